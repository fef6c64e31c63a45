"""What `fskv top` shows, how it is drawn, and the terminal that it is drawn on."""
