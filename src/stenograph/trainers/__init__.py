"""Rows for trainers: pure functions from decoded samples to what each trainer takes. Imports no trainer."""
