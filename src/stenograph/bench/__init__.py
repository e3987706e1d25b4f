"""Measurements of Stenograph, reproducible and comparable."""
