"""A newcomer's way to the state: hashed chunks from several donors at once.

``machine`` asks donors for one round's snapshot, gathers ``chunks``, and says why none came. ``donor`` is
what it knows of each donor, and ``snapshots`` what a donor gives. ``frame`` seals what goes over a
connection, ``wire`` encodes it.
"""
