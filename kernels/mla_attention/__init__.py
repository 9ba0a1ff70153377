"""Causal attention within packed documents, keys wider than values."""
