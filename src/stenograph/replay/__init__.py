"""Sessions lived again: each request of a stored session gets its recorded reply.

Owns the search for a request's reply, how far a session has been lived, and the pace of the replies. Must not know how
a turn is made, how rows are stored, or how a dialect spells anything.
"""
