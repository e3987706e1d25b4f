"""Rows for trainers: pure functions from decoded samples to each trainer's types. Imports no trainer."""
