"""The simulator: the production control code under a virtual clock, over modelled engines and trainer."""
