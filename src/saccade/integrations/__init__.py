"""Integrations: the calls of other libraries, answered by saccade."""
