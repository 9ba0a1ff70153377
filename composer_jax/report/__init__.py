"""One self-contained HTML page from a run folder; reads files only and never imports jax."""
