"""What must hold while a world runs, one checker for each property.

``rounds`` (nothing is averaged that was not sent, weights add up, ends come in time), ``groups``, ``rows``;
``progress`` heals the network and demands that rounds become whole again; ``replay`` tells a fresh machine
what another was told.
"""
