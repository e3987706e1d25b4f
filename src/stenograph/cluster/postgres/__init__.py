"""Sessions in a PostgreSQL shared by several nodes: their owners, and rows added by the owner alone."""
