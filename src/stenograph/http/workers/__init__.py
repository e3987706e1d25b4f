"""Several processes as one server: which of them has a session, and the ways between them."""
