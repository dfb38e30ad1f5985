"""``ragtag probe``: what selecting and coding cost on this machine, and whether they pay over a link.

``source`` says where a vector comes from (``script`` runs a user's first steps); ``measure`` measures;
``view`` shows.
"""
