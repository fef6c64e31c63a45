"""The directory that engines share: opened, reached through no link, and what its file system says."""
