"""Whatever samples tokens, behind one small interface."""
