"""The cost of sessions on disk: a restart, the first touch of one that is not in memory, and memory."""
