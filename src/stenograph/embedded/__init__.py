"""A small Llama engine for the CPU: numpy forward, continuous batching, guided decoding."""
