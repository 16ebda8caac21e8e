"""A run on the nodes of a Ray cluster: the same control plane and processes, hosted by actors."""
