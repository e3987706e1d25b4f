"""A session's rows as bytes: the opening of a session, and the additions of each commit. Pure.

A row is a head, a payload in MessagePack, and (in a column of its own) a digest. The head has the version of this
format, the kind of the row and the session's totals after it: a list of sessions reads heads alone. The digest is
SHA-256 of the digest of the row before, the session's id, the row's number, its head and its payload: it finds a
changed byte, a moved row and a missing row. Format: docs/store.md.

A turn is written as its additions: tools, parameters and fields of the request equal to its parent's are left out, and
ids of the line before are not there. Ids and logprobs are the bytes of their arrays, little-endian, and come back bit
for bit. Texts are UTF-8 with lone surrogates, since a JSON text can hold them.
"""
