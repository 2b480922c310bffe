"""Softmax attention over dense and packed sequences."""
