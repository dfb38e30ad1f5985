"""The only place that reads a clock and a socket: real datagrams under the machines of ``protocols``.

``link`` turns runs into datagrams and back, over UDP or in memory; ``control`` says how many may be under
way; ``driver`` is the thread that runs a peer's node; ``membership`` is SWIM over a socket of its own;
``transfer`` gives and fetches training state over TCP. A run leaves through ``driver`` -> ``link.outbox`` ->
``link.frame`` -> a link, and comes back through a link -> ``link.inbox`` -> ``driver``.
"""
