"""What must hold while a world runs, one checker for each property.

``rounds``: no values are averaged that were not sent, weights add up, outcomes come once. ``groups`` and
``rows`` hold the same for averages in groups and for gathered rows; ``means`` says what a mean is.
``progress`` heals the network and demands that rounds become whole again. ``replay`` gives a fresh machine
the events that another was given.
"""
