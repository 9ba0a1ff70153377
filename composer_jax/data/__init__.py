"""Real code and agent traces, from files on disk to packed token batches."""
