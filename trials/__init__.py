"""Commands that try to break fskv's promises for minutes: `python -m trials.NAME`; exit code 1 if one breaks.

Not tests, and not benchmarks: storms of killed writers, thousands of corruptions and forgeries, two
engines on a bounded root. They stand on the rig of `benchmarks` and on `faults`.
"""
