"""A channel: what an averager is, which there are, and one peer's part in all rounds.

``averager`` is the interface, ``averagers`` the registry: a new one is its file and a line there.
``at_once`` runs the rounds of those that average all at once: it makes a machine for each
(``protocols.rounds``), feeds it and ends it. ``budgets`` are their deadlines, learned from measurement.
``presence`` is the crew as one peer sees it.
"""
