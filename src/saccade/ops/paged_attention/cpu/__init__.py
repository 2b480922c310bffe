"""Attention over pages in PyTorch."""
