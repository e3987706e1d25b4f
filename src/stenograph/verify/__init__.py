"""Whether a model's template is append-only, and whether TITO is exact for it."""
