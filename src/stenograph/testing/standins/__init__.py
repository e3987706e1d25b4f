"""Complete stand-ins of engines and of time."""
