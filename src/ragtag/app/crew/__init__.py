"""A crew as a script sees it, and the way into it.

``join`` goes from the environment to a peer that has met the others, by ``membership`` (seats),
``greeting`` (versions) and ``parties`` (who goes on where they do not agree). ``crew`` is what scripts see
of it; behind that, ``peer`` is this process's part, for optimizers and hooks. It has a ``transport`` (a
driver, bound to training), a ``logbook`` (the trace), its ``state`` (kept, given, taken) and its ``data``
(splits and epochs); ``finish`` begins and ends with one model.
"""
