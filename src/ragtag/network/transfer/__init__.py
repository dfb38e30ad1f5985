"""Training state over TCP, from several donors at once; ``protocols.transfer`` says what is asked of whom.

``snapshots`` carries them from the trainer's thread to the donor's; ``donor`` is that thread, ``session``
one newcomer's connection there, ``budget`` what giving may cost. ``fetch`` is the newcomer's side, with
a line to each donor.
"""
