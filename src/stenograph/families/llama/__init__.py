"""Llama 3 to 3.3."""
