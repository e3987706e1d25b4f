"""GLM-4.5 to GLM-5."""
