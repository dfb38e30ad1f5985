"""A newcomer's way to the state: hashed chunks from several donors at once.

``machine`` asks donors in rounds (``round``) and takes what is whole (``chunks``); ``donor`` answers;
``frame`` seals, ``wire`` encodes; ``reason`` says why nothing came.
"""
