"""Kernels compiled without a GPU, for all architectures: what they take, and how they are tuned."""
