"""Guided decoding: grammars compiled, and one request's way through its grammar."""
