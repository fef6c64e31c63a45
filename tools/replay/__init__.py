"""The hits of a request trace by the size of the root, simulated: what `fskv replay` does."""
