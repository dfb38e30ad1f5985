"""Machines without I/O: ``step(now_s, event) -> effects``. See docs/architecture.md, "One idea".

``rounds`` is one round among peers that average all at once (RPS, all-reduce, rows); ``channel`` is what an
averager is, the registry, and all rounds of a channel; ``groups`` is Moshpit and what it is compared with;
``central`` a state that the peers share; ``publish`` named tensors that one peer computes for all;
``membership`` which peers there are; ``sealing`` their keys; ``secagg`` a sum of which nobody sees the
parts; ``transfer`` a newcomer's way to the state; ``crew`` meetings and the notice board. ``node`` routes
between them, and is what a driver runs.
"""
