"""Sweeps: override dicts become content-hashed trial folders, run one after the other."""
