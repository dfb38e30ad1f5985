"""Who there is, without a master: SWIM (Das et al., DSN 2002) with what came after it.

``machine`` answers and tells; ``probe`` finds the dead, ``suspicion`` doubts them first, ``gossip`` passes
news on, ``view`` is what is known, ``entry`` the way in, ``wire`` the datagrams. ``roster`` says who has
which seat, ``seating`` is a newcomer's way to one, ``invitation`` a token's contents.
"""
