"""Masks and scores as data: a function is run once on symbols, and what it computes is kept."""
