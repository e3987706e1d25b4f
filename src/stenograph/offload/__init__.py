"""Where CPU work runs, so that the event loop never waits for it."""
