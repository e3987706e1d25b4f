"""Shared by the protocols: fields of sampling, the rules of fields, parts of replies, errors, events. Pure."""
