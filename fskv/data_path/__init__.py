"""Moves files between KV pages and the root: jobs, I/O threads, deadlines, what a file is worth."""
