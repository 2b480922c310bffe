"""Attention over pages in PyTorch, for machines without a GPU."""
