"""StaleFlow: asynchronous RL post-training of language models under a strict staleness bound."""

__version__ = "0.1.0"
