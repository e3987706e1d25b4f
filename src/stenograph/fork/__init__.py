"""Sessions that begin where another one was: behind a turn, or behind a sampled token.

Owns the route, and the turns that a fork begins with. Must not know how a turn is made, nor how a store keeps rows.
"""
