"""Training state over TCP, from several donors at once. ``protocols.transfer`` decides what to ask of whom.

A donor is a peer that gives its state away; a newcomer fetches it.

snapshots: carries snapshots of the state from the trainer's thread to the donor's.
donor: the donor's thread.
session: one newcomer's connection, in that thread.
budget: what giving may cost.
fetch: the newcomer's side, with a line to each donor.
"""
