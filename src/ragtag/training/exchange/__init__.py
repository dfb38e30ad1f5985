"""What a crew's optimizer does with a model in each round.

``combine`` is the table of what may be asked for together.
"""
