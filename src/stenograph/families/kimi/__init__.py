"""Kimi K2 Thinking and K2.5."""
