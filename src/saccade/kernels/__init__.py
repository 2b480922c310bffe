"""Kernels: the device functions that all Triton and Gluon kernels of Saccade are made of."""
