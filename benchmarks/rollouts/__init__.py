"""The CPU that the client takes for a rollout."""
