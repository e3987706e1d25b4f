"""Several processes as one server: the owners of sessions, and the ways between them."""
