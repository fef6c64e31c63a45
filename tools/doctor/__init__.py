"""Looks at a machine, a mount and a root, and says what to do about it: `fskv doctor`."""
