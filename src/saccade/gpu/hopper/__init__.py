"""What Gluon kernels for capability 9.0 share: rings of tiles, descriptors, schedules."""
