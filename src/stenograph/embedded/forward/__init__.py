"""The forward pass of a Llama model, and its weights."""
