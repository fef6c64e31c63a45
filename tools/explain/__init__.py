"""Why a prompt or a key would hit or miss: what a hit needs, what is there, and why something is not."""
