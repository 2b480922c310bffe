"""Attention in fp8: e4m3 queries, keys, values and weights, summed in float32; forward only."""
