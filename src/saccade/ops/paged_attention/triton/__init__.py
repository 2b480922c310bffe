"""Attention over pages in Triton: decoding, chunks of prompts, and how work is shared out."""
