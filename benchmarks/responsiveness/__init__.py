"""stenograph bench responsiveness."""
