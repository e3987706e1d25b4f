"""Durable sessions: the rows of a commit, where they lie, and how they are read back."""
