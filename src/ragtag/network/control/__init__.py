"""How much may be under way to a peer, and how fast it may leave.

``path`` numbers and measures what is sent in one direction (round trips, losses, the rate at which it
arrives) and asks its controller; ``controller`` says what one is told and asked. ``bbr`` is the one that
paths have: it models the path, paces, and does not mind what the path loses of itself. ``window`` is a window
that halves as a test when more is lost than usual, and does not pace; beside it is that of paths over TCP. A
new one is its file and a line of ``path.CONTROLLERS``.
"""
