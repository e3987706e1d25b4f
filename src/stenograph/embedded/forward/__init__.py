"""The forward pass of a Llama model, and the weights that it reads."""
