"""What a crew does beside averaging.

``joining`` is the way in: to a seat, to the others, and for each channel to the first average. It and
training talk by ``meet`` (all tell each other something once) and ``board`` (each peer's newest value of a
topic). ``posting`` is a board as training sees it, and ``standing`` says by it which peers are behind.
``district`` says which others a peer of a large crew meets.
"""
