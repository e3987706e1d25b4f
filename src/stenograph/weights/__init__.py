"""Part: new weights and engines for a server that runs."""
