"""A crew as a script sees it, and the way into it.

``join`` goes from the environment to a peer that has met the others: it carries out what
``protocols.crew.joining`` decides, with ``membership`` (sockets, invitations) and ``phases`` (what the trace
and the log are told). ``crew`` is what scripts see of it; behind that, ``peer`` is this process's part, for
optimizers and hooks. It has a ``transport`` (a driver, bound to training), a ``logbook`` (the trace), its
``data`` (splits and epochs) and ``donors`` of its state; ``finish`` begins and ends with one model.
"""
