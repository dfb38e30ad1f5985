"""Membership (``protocols.membership``) over a UDP socket of its own.

``agent`` carries the machine's datagrams, timers and clock; ``admission`` asks the members that an
invitation names for the crew's key.
"""
