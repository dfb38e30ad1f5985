"""Storms: faults drawn from a seed, checked throughout, then healed.

``rounds`` storms every averager, ``membership`` the machine that says which peers there are.
"""
