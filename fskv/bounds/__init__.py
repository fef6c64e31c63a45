"""Keeps a root within its bounds: claims of engines, a leader that counts and evicts, news of it."""
