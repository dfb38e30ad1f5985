"""A peer's thread: it alone reads the clock and the link, and runs the peer's node.

driver: what the rest of the process asks. It owns the engine.
engine: the thread. It also turns what membership says into events for the node and addresses for datagrams.
mailbox: calls go to the thread through it, and are answered through its promises.
"""
