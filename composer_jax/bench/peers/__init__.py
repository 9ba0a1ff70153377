"""Scripts that run in a peer's interpreter; nothing here imports them."""
