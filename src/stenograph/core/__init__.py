"""Values, errors, settings and time: every other room may know them, and they know no other room."""
