"""Mistral's models with a Tekken tokenizer."""
