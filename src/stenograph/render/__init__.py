"""Messages to token ids and back, per model family. Pure: no I/O after loading, no clock."""
