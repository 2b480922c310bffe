"""Linear attention in Gluon for capability 9.0."""
