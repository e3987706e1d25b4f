"""Values, errors, settings and time: what every other room may know, and which knows none of them."""
