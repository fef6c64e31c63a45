"""Keeps a root within its bounds: heartbeats of engines, a leader that counts and evicts, news of it."""
