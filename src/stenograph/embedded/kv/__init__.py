"""The books of the KV store: the rows of each sequence, and the prefix tree for finding them again. Pure."""
