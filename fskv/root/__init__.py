"""The directory that engines share: opening without links, small files, facts of its file system."""
