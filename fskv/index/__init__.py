"""The knowledge of files on disk: presence of chunks, walks of a namespace, its snapshot."""
