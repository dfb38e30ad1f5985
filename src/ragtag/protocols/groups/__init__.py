"""Averaging in groups: Moshpit All-Reduce (Ryabinin et al., NeurIPS 2021), and what it is compared with.

``channel`` is the averager (``Moshpit``, ``RandomGroups``): a peer looks for a group in each round, and
averages in it. ``keys`` says which group, on a ``grid`` or at random. ``host`` brings a group's members
together, and ``group`` runs a round among them. ``machine`` is what these share with ``gossip``, ``pushsum``
and ``tree``.
"""
