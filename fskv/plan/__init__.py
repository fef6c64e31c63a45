"""Where the bytes of chunks lie and which of them a job moves. Pure."""
