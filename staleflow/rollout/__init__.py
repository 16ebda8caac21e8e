"""Rollout: the interface every engine implements, and the built-in engine in PyTorch."""
