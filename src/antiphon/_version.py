"""The version of the distribution, kept apart so that building it imports nothing else."""

__version__ = "0.1.0.dev0"
