"""Accounts: where every sampled token went, and who may train it. A part: docs/accounts.md."""
