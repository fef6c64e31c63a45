"""A namespace, or some of its chunks, as one tar stream: written by `fskv export`, read by `fskv import`."""
