"""Grammars to hold a reply: its calls, their arguments, and the text before them."""
