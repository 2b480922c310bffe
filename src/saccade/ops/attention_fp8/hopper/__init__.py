"""fp8 attention in Gluon for capability 9.0, whose products are WGMMA of e4m3 numbers."""
