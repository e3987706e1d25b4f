"""gpt-oss, in the harmony format."""
