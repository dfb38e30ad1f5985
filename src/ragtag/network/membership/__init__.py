"""Membership (``protocols.membership``) over a UDP socket of its own.

agent: gives the machine its datagrams, timers and clock.
admission: asks the members that an invitation names for the crew's key, and where they see this peer.
"""
