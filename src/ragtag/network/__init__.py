"""The only place that reads a clock and a socket: real datagrams under the machines of ``protocols``.

link: turns runs (consecutive chunks of one message from one peer) into datagrams and back, over UDP or in
    memory.
control: says how many datagrams may be under way to a peer, and how fast they may leave.
driver: the thread that runs a peer's node.
membership: SWIM, over a socket of its own.
transfer: gives and fetches training state over TCP.

A run leaves through ``driver`` -> ``link.outbox`` -> ``link.frame`` -> a link. It comes in through a link ->
``link.inbox`` -> ``driver``.
"""
