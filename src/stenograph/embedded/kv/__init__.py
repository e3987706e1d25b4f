"""The books of the KV store: the rows of each sequence, and the prefix tree that finds them again. Pure."""
