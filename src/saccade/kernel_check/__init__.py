"""Compile kernels for every architecture without a GPU, check what they use, and tune them."""
