"""Anthropic's Messages: requests, replies, streams, errors, and the counting of tokens."""
