"""`python -m fskv_tools`: the same as `fskv`."""

from .cli import main

main()
