"""OpenAI's Responses: items to messages, replies to items and events."""
