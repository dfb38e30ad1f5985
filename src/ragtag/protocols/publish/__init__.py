"""Named tensors that one peer computes and all others get.

``assignment``: which peer computes what, and who stands in for it: a pure function of costs and of who lives.
``channel``: how the values travel: an owner tells all peers which versions it has; each peer asks for what it
lacks, a window at a time; a value replaces an older one only when all of it has come.

Training sees both as ``crew.tensors`` (``training.named``).
"""
