"""The place of chunks' bytes, and the chunks that a job moves. Pure."""
