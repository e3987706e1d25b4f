"""The console: a session shaped for a person's eyes, and its page."""
