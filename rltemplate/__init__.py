"""Reinforcement-learning research whose every run can be traced and replayed.

Importing the package imports nothing else: neither torch nor Hydra.
"""

__version__ = "0.1.0"
