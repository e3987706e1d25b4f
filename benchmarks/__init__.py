"""Measures what the repository promises of itself. A checkout has it, and `stenograph bench` runs it; no wheel does."""
