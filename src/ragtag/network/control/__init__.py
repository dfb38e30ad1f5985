"""How much may be under way to a peer, and how fast it may leave.

``path`` numbers and measures what is sent in one direction (round trips, losses, the rate at which it
arrives) and asks its controller; ``controller`` says what one is told and asked; ``window`` is the first one.
A new one is its file and a line of ``path.CONTROLLERS``.
"""
