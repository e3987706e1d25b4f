"""stenograph bench streaming."""
