"""Are chunk files what their names and headers say? Only `removal` changes anything on a disk."""
