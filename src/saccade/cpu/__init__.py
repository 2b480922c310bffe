"""Tiled attention in PyTorch: the practical path on a machine without a GPU."""
