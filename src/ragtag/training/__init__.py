"""Training, and what it asks of a network (``transport``): torch above, machines and transports below.

``optimizer`` is what a script holds; ``exchange`` what it does with a model in each round; ``tensors`` how
tensors lie in the table that is averaged; ``samples`` says which peer draws what; ``state`` what is kept,
given and compared; ``align`` keeps replicas alike. A tensor goes: ``optimizer`` -> ``exchange`` ->
``tensors.bucket``
-> ``transport``, and back.
"""
