"""`fskv replay`: the hits of a request trace by the size of the root, simulated."""
