"""What a crew does beside averaging: ``meet`` (all tell each other something once), ``board`` (each peer's
newest value of a topic), ``district`` (whom a peer of a large crew meets).
"""
