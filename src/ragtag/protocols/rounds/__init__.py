"""One round among peers that average all at once.

``layout`` cuts a vector into blocks with owners; ``base`` says what a round is. Values go to owners and
averages come back (``stages``, ``reduce``). ``rps`` (Yu et al., ICML 2019) leaves out what is lost;
``allreduce`` repairs it (``repair``), straight or around a ring. ``gather`` brings rows that each peer chose
to all. ``progress`` says which peers a stage waits for; ``asking`` asks whether a peer is there.
"""
