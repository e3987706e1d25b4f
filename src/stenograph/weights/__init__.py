"""Part: new weights and engines for a running server."""
