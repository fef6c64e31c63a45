"""One HTML page about a root: its template, and the template's data."""
