"""The embedded engine: a Llama in its own process, on NumPy or torch. Start reading at `engine_core.py`."""
