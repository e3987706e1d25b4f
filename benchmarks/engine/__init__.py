"""The embedded engine's tokens for a second of CPU, beside llama.cpp."""
