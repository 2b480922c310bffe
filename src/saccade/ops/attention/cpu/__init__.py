"""Softmax attention in PyTorch, tile by tile, for machines without a GPU."""
