"""Are chunk files what their names and headers say? For `fskv inspect` and `fskv verify`; changes nothing but `removal`."""
