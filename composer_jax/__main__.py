"""`python -m composer_jax` is the `composer-jax` command."""

import sys

if sys.version_info < (3, 12):
  sys.exit('composer-jax: error: needs Python >= 3.12, this is {}.{}'.format(*sys.version_info[:2]))

from composer_jax.cli.main import console

if __name__ == '__main__':
  console()
