"""K-FAC against the optimizers that people use, alone and in a crew that loses datagrams and peers.

``training`` has the methods and what trains them: one process with the joint batch, or a crew of users' loops
in virtual time. ``recipe`` says which runs there are, tunes, compares and draws.
"""
