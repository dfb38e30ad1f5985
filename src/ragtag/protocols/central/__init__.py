"""A central state without a master: blocks with owners among the peers, rebuilt when one dies.

``channel`` is a peer's own turns: it pushes updates and takes the newest values. ``keeper`` is its part as
an owner: a ``block`` judges updates by a rule (a schedule), a ``gate`` holds barriers, ``grouping`` and
``book`` groups by speed. ``owners`` says whose a block is, ``copies`` and ``rebuild`` how it is found
again, ``wire`` how it travels.
"""
