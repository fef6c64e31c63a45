"""fskv_tools: the command-line tools of fskv."""
