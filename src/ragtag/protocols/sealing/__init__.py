"""Keys between processes: who may speak, and for whom.

noise: handshakes of the Noise framework, held to its official vectors.
sessions: the two datagrams by which two processes come to keys, when they come to new ones, and which numbers
    have come under each.

A public key goes from a process over its membership card to all others. ``Sessions`` makes keys of it on
demand. What goes over the line under them is ``network/link/sealed``.
"""
