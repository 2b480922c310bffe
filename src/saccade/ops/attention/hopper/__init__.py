"""Softmax attention in Gluon for capability 9.0, which loads by TMA and multiplies by WGMMA."""
