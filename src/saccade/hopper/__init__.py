"""Hopper: kernels in Gluon for GPUs of capability 9.0, which load by TMA and multiply by WGMMA."""
