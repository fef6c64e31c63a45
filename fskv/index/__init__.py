"""What is on disk, from memory: presence of chunks, walks of a namespace, its snapshot."""
