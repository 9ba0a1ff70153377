"""Decoding by absorbed MLA over a paged latent cache."""
