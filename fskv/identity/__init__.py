"""Fingerprints of checkpoints, read from untrusted files, and the rule for settings."""
