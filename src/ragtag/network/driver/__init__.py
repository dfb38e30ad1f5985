"""A peer's thread: it alone reads the clock and the socket, and runs the peer's node.

``driver`` is what the rest of the process asks, and is answered by futures; ``engine`` is the thread;
``mailbox`` carries calls to it; ``members`` turns what membership says into what the node is told and where
datagrams go.
"""
