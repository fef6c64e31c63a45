"""Commands that measure fskv beside what shares its process: `python -m benchmarks.NAME`.

Not tests: they print what they find on your machine. docs/benchmarks.md says how to read them.
"""
