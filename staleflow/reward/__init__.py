"""Rewards: functions that score a finished response, and the worker processes that run them."""
