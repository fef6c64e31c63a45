"""Which weights are these? Fingerprints of checkpoints, read from untrusted files."""
