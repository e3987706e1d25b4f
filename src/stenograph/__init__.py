"""Stenograph: a session server between agent harnesses and inference engines that keeps exact tokens."""

__version__ = "0.2.0"
