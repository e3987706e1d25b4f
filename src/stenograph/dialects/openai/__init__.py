"""OpenAI's chat completions and completions: bytes to core values and back. Pure."""
