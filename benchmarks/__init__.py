"""Measurements: each script runs by itself. A package, so that no other of that name is found first."""
