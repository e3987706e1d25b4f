"""llama.cpp's completion route."""
