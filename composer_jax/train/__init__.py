"""Supervised training: optimizer, losses, the pure step, the resumable loop, cpt and sft."""
