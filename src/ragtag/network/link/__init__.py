"""Runs to datagrams, and datagrams to runs.

``udp`` is a socket that moves trains of datagrams (segmentation, coalescing); ``frame`` writes and reads
their headers, ``kernels`` is the same compiled; ``flow`` is what is kept for each peer; ``outbox`` sends
what is queued, marks the end of messages and answers; ``inbox`` takes what comes; ``inject`` loses, delays
and freezes as ``core.faults`` says, with the simulator's own draws.
"""
