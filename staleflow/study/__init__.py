"""Questions to the simulator: compare, plan, the law, the policies of other systems."""
