"""The gated delta rule by Triton kernels, for every GPU from Turing to Blackwell."""
