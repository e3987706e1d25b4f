"""Token ids to messages and messages to token ids. Pure: no I/O after loading, no clock."""
