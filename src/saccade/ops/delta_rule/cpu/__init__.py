"""The gated delta rule in PyTorch, chunk by chunk."""
