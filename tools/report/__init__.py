"""One HTML page about a root: what is there (survey), how it is drawn (plots), what the page says (page)."""
