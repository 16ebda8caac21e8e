"""Who owns what: trajectories, weight versions and the journal of everything that happened to them."""
