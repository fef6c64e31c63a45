"""A request trace against a real root: what `fskv replay` does."""
