"""Moves files between KV pages and the root: jobs, I/O threads, deadlines, the judgement of files."""
