"""One HTML page about a root: its figures, its template, and the template's data."""
