"""Agents: episodes of several turns, the endpoint that serves them tokens, and the environments that play them."""
