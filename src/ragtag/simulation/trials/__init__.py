"""Storms: faults drawn from a seed, checked throughout, then healed.

``rounds`` for every averager, ``membership`` for who is there.
"""
