"""How much may be under way to a peer.

``window`` grows and shrinks a window of datagrams by what is acknowledged, and measures round trips (RFC
6298).
"""
