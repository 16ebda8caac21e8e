"""The decisions that fight skew: pure functions of a snapshot that return commands."""
