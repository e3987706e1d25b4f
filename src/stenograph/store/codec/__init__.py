"""A session's rows as bytes: the opening of a session, and what each commit added to it. Pure.

A row is a head, a payload in MessagePack, and (in a column of its own) a digest. The head has the version of this
format, the kind of the row and the session's totals after it, so that a list of sessions reads heads alone. The digest
is SHA-256 of the digest of the row before, the session's id, the row's number, its head and its payload: it finds a
changed byte, a row that was moved, and one that is missing. Format: docs/store.md.

A turn is written as what it added: what is equal to its parent's (tools, parameters, fields of the request) is left
out, and ids of the line before are not there. Ids and logprobs are the bytes of their arrays, little-endian, so that
each comes back bit for bit. Texts are UTF-8 with lone surrogates, which a JSON text can hold.
"""
