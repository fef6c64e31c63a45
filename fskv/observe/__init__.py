"""The signs of fskv's state: metrics, lines in the log, the health file."""
