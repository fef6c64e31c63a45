"""Checks of a machine, a mount and a root, with a remedy for each finding: `fskv doctor`."""
