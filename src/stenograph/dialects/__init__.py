"""Wire dialects: bytes to core values and back. Pure: no I/O, no clock, no tokens."""
