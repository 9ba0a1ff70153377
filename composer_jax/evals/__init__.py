"""Evaluation: pass@k on held-out tasks with the training harness, and held-out bits per byte."""
