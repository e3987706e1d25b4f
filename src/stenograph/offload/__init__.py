"""Runs CPU work, so the event loop never waits for it."""
