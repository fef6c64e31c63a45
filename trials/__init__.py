"""Commands that try to break fskv's promises for minutes: `python -m trials.NAME`; exit code 1 if one breaks.

Not tests, and not benchmarks: storms of killed writers, thousands of corruptions, two engines on a bounded
root, an hour of faults, deliberate faults that tests have to notice. They stand on `faults` and on the rig of
`benchmarks`.
"""
