"""The ``ragtag`` command: ``main`` has the commands, the other modules one each and what they share.

What is heavy (numpy, torch) is imported by the command that needs it.
"""
