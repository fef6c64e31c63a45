"""The judgement of chunk files: do they agree with their names and headers? Only `removal` changes anything
on a disk.
"""
