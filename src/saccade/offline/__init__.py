"""Offline: what is done to kernels ahead of any call: compiled for every GPU, looked at, tuned."""
