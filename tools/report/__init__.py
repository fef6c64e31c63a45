"""One HTML page about a root: its figures, its template, and what the template is given."""
