"""What sessions on disk cost: a restart, the first touch of one that is not in memory, and memory."""
