"""Decide in one process, inside a test, whether two callables compute the same: what the pytest plugin drives."""
