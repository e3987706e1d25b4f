"""Qwen 2.5 to 3.5 and Qwen3-Coder."""
