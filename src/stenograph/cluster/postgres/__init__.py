"""Sessions in a PostgreSQL that several nodes share: who owns which, and rows that only the owner can add."""
