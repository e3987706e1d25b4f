"""stenograph bench serving."""
