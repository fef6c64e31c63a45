"""`fskv explain`: the needs of a hit, the files that are there, and the reasons for missing ones."""
