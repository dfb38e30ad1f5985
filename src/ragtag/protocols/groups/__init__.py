"""Averaging in groups: Moshpit All-Reduce (Ryabinin et al., NeurIPS 2021), and what it is compared with.

``keys`` says which group a peer averages in, on a ``grid`` or at random; ``host`` brings the members of a
group together, ``search`` is the peer that looks for one; ``group`` runs a round among them; ``channel`` is
the averager (``Moshpit``, ``RandomGroups``). ``machine`` is what these share with ``gossip``, ``pushsum``
and ``tree``.
"""
