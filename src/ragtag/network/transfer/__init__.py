"""Training state over TCP, from several donors at once. ``protocols.transfer`` decides what to ask of whom.

A donor is a peer that gives its state away; a newcomer fetches it.

donor: the donor's thread.
session: one newcomer's connection, in that thread.
budget: what giving may cost.
fetch: the newcomer's side, with a line to each donor.
"""
