"""The screen of `fskv top`: its content, its drawing and its terminal."""
