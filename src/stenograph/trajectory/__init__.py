"""A session's committed turns, and where a request attaches to them. Pure: no clock, no I/O, no engine."""
