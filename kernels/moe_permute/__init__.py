"""Rows of tokens sorted by expert, and their weighted sums back at the tokens."""
