"""An engine of our own: real weights, numpy, one CPU. `engine_core.py` is where to start reading."""
