"""What training consists of: taken out, kept, given to newcomers, compared at the end.

``capture`` takes a ``snapshot`` and puts it back (``tree``, ``optimizer_state``, ``compression_state``);
``checkpoint`` keeps them in files (``checkpoint_file``, ``atomic``). ``follower`` and ``replay`` take the
steps that a newcomer missed, ``standing`` says which peers are behind; ``whole`` is how peers end with the
same model.
"""
