"""Committed turns to training samples."""
