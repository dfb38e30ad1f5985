"""What a crew does beside averaging.

``joining`` is the way in: to a seat, to the others, and for each channel to the first average. ``meet`` (all
tell each other something once) and ``board`` (each peer's newest value of a topic) are what it and training
talk by (``posting`` is a board as training sees it); ``district`` says whom a peer of a large crew meets.
"""
