"""Complete stand-ins for tests and benchmarks: engines, their servers, a hub, databases, time, and tiny models."""
