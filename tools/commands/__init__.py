"""One module per command of `fskv`: it parses, calls a room of this package and prints."""
