"""Part: copies of the store, while the server runs."""
