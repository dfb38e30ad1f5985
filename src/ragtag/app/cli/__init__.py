"""The ``ragtag`` command: ``main`` has the commands; ``start`` has those that start peers, ``probe`` its own.

What they share is in ``options`` and ``common``. What is heavy (numpy, torch) is imported by the command
that needs it.
"""
