"""What training consists of: taken out, kept, given to newcomers, compared at the end.

``capture`` takes a ``snapshot`` and puts it back (``tree``, ``optimizer_state``, ``compression_state``);
``checkpoint`` keeps them in files (``checkpoint_file``, ``atomic``), and ``keeper`` has all that belongs to a
peer's training. ``abreast`` sees when a peer lacks what its crew has, and gets it: ``follower`` and
``replay`` take the steps that it missed. ``whole`` is how peers end with the same model.
"""
