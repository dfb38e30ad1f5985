"""A central state without a master: blocks with owners among the peers, rebuilt when one dies.

``channel`` runs a peer's own turns: it pushes updates and takes the newest values. ``server`` is its part as
an owner: a ``block`` judges updates by a rule (a schedule), a ``gate`` holds barriers, ``grouping`` and
``speeds`` form groups of like speed. ``owners`` says which peer owns a block, ``copies`` and ``rebuild`` find
it again, and ``wire`` says how it travels.
"""
