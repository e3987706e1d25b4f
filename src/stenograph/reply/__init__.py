"""Sampled text to content, reasoning and tool calls."""
