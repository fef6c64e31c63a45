"""Load or recompute, and from which of several roots. Pure."""
