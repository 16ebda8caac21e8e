"""What the trainer computes: advantages, losses, off-policy correction."""
