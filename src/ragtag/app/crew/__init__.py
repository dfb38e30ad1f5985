"""A crew as a script sees it, and the way into it.

``join`` goes from the environment to a peer that has met the others, by ``membership`` (seats),
``greeting`` (versions) and ``parties`` (who goes on where they do not agree); ``crew`` is what it returns;
``transport`` binds a driver to training, ``state`` keeps, gives and takes training state, ``catching_up``
gets into step, ``finish`` begins and ends with one model; ``logbook`` writes the trace.
"""
