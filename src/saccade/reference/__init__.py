"""The specification: attention in plain PyTorch, written to be read, in any dtype up to float64."""
