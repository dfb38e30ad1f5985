"""Worlds: what is simulated, on an event heap.

``rounds`` runs nodes that average; ``members`` membership; ``crew`` both, with seats (``process`` is one of
its peers); ``newcomer`` a peer's whole way in; ``transfer`` a newcomer and its donors.
"""
