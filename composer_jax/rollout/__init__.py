"""Sampling from the policy: engine, continuous-batching scheduler, and the session protocol.

`session` and `types` import neither JAX nor the model, so that environments and tests can use them.
"""
