"""Softmax attention in Triton, for GPUs from Turing to Blackwell and AMD's CDNA 3."""
