"""The console: a session shaped for a person's eyes, and the page that shows it."""
