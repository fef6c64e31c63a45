"""Nothing is processed."""
