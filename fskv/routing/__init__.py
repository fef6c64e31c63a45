"""From which of several roots a request is loaded. Pure."""
