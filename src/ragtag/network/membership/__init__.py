"""Membership (``protocols.membership``) over a UDP socket of its own.

agent: gives the machine its datagrams, timers and clock.
datagrams: a UDP socket with TCP connections beside it, which are used where UDP brings nothing back.
admission: asks the members that an invitation names for the crew's key, and where they see this peer.
"""
