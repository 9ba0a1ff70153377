"""Accelerator kernels, one folder per op; imported as `composer_jax.kernels`."""
