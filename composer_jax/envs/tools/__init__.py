"""Tool-call parser and the tools themselves."""
