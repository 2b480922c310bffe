"""Serving: many requests at once through one Hugging Face model, on pages."""
