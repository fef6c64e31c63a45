"""Chunk files on their way between roots, or to and from an archive: `export`, `import`, `copy`."""
