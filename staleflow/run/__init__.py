"""A run on disk and in numbers: its directory, record, state and what things took."""
