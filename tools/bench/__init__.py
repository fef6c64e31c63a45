"""`fskv bench`: the speed of fskv on a mount, and the options that suit it."""
