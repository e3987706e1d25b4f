"""Sessions, their histories, and the life of a turn. Start reading at turn.py."""
