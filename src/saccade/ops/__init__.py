"""The operations: each with its call, its reference, and its backends."""
