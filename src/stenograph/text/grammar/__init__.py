"""Grammars that hold a reply: its calls, their arguments, what stands before them."""
