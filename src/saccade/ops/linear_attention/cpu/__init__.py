"""Linear attention in PyTorch, chunk by chunk."""
