"""The optimizer that a script holds: a torch optimizer whose model is averaged with a crew's.

``optimizer`` is what a script sees. It hands its steps to ``averaged``, which asks an exchange to average,
and which the crew gives state and asks where it stands. ``scheduling`` says when and with which peers
(``ragtag.schedules``), ``speeds`` how fast each peer goes; ``modes`` whether models or gradients are
averaged; ``weight`` how much a peer counts.
"""
