"""fp8 attention by Triton kernels, for GPUs that multiply e4m3 numbers."""
