"""rollstore: the record and the store for language-model rollouts."""

__version__ = "0.1.0"
