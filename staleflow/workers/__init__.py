"""What runs inside a role: rollout, trainer, evaluator."""
