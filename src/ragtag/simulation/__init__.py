"""Virtual time: the machines of ``protocols`` without sockets, decided by a seed.

``loop`` has the clock, the heap, and processes that freeze or end. ``worlds`` put peers on a loop; ``link``
says what arrives and when, ``cost`` how long a peer computes. ``check`` holds invariants while a world runs.
``trials`` draw storms of faults from a seed. ``transport`` is a crew in virtual time under training code as
users write it.
"""
