"""Portable: one Triton source for every GPU from Turing to Blackwell, and AMD's CDNA 3."""
