"""What fskv shows of itself: metrics, lines in the log, the health file."""
