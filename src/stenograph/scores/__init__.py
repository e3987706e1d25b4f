"""The part of scores: recorded tokens under another model, other weights or another prompt."""
