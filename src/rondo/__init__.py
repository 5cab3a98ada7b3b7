"""rondo: reinforcement-learning post-training for language models, from a laptop's CPU to a GPU cluster.

Importing this package imports nothing heavy and has no effects.
"""

__version__ = "0.1.0"
