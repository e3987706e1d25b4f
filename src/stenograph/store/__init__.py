"""Sessions that survive their process: what is written of a commit, where, and how it is read back."""
