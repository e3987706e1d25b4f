"""vLLM's token-in, token-out routes."""
