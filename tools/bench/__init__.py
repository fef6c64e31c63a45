"""The speed of fskv on a mount, and the options that suit it: what `fskv bench` measures."""
