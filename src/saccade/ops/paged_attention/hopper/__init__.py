"""Attention over pages in Gluon for capability 9.0."""
