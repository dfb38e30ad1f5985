"""Which peers there are, without a master: SWIM (Das et al., DSN 2002) with what came after it.

``machine`` takes events. ``probe`` finds the dead, ``suspicion`` gives them time to refute, ``gossip`` passes
news on, ``view`` is what this peer believes, ``entry`` the way in, ``wire`` the datagrams. ``roster`` says
which member has which seat, and how a newcomer comes to one. ``invitation`` gives the crew's key to holders
of an invitation.
"""
