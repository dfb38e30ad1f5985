"""Worlds: simulations on a loop (``simulation.loop``).

``rounds`` runs nodes that average, ``members`` membership, ``crew`` both, with seats (``process`` is one of
its peers). ``newcomer`` runs a peer's whole way in, ``transfer`` a newcomer's donors.
"""
