"""Attention over keys and values that lie in pages."""
