"""What differs between model families, as data."""
