"""Runs CPU work, so that the event loop never waits for it."""
