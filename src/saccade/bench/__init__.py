"""Bench: named problems, peers that solve them, and times that can be compared."""
