"""What `fskv bench` measures, who takes part, and what comes out."""
