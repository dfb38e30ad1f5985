"""Named tensors that one peer computes and all others get.

``assignment`` says which peer computes what, and which one stands in for it. It is a pure function of costs
and of the peers that live. ``channel`` brings the values: an owner tells all peers which versions it has,
each peer asks for what it lacks, a window at a time, and a value replaces an older one only when all of it
has come. Training sees both as ``crew.tensors`` (``training.named``).
"""
