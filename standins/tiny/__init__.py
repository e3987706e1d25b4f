"""The smallest model files that are real."""
