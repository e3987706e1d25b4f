"""stenograph bench guided."""
