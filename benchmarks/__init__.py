"""Benchmarks of the repository itself; not installed. scripts/bench runs them."""
