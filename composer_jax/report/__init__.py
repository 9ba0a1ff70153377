"""One self-contained HTML page from a run folder; reads files only and never imports jax."""

from composer_jax.report.page import build

__all__ = ['build']
