"""The laws of engines, as tests for whoever writes an adapter."""
