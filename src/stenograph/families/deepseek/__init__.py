"""DeepSeek V3 to V4 and R1."""
