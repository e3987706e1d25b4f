"""The cost of the text side of a turn."""
