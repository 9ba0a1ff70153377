"""Saving and restoring: training state with its cursors, and parameters handed between stages."""
