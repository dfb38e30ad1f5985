"""``ragtag probe``: what sending less costs on this machine, where it pays, and what a crew's links do.

``source`` says where a vector comes from (``script`` runs a user's first steps); ``measure`` measures what
selecting and coding take; ``view`` shows. ``crew`` measures a crew's links, ``links`` is the table of them,
and ``estimate`` says what an average takes over them.
"""
