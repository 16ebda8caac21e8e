"""The control plane and the port through which it reaches the world."""
