"""A channel: what an averager is, which averagers there are, and one peer's part in all rounds.

``averager`` is the interface, ``averagers`` the registry. A new averager is a file and a line there.
``at_once`` runs rounds in which all average at once: it makes a machine for each round
(``protocols.rounds``), feeds it and ends it. ``budgets`` learns their deadlines from measurement.
``presence`` is the crew as one peer sees it.
"""
