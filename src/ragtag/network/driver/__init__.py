"""A peer's thread: it alone reads the clock and the link, and runs the peer's node.

``driver`` is what the rest of the process asks; ``engine`` is the thread, which it has, and turns what
membership says into what the node is told and where datagrams go. Calls go to the thread through ``mailbox``,
and are answered through its promises.
"""
