"""The `composer-jax` command: one thin module a verb, none of which imports jax before it works."""
