"""What Triton and Gluon kernels share, on the device and on the host."""
