"""Measurements beside other software: paired timing, workers in other interpreters, tables."""
