"""composer_jax: the training of a coding agent, from continued pretraining to asynchronous RL.

Importing this package imports nothing else; notebooks and scripts start from `composer_jax.api`.
"""
