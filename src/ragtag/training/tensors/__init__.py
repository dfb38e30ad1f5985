"""Tensors as one table of float32, and back.

``modules`` says which tensors are averaged and what they are called; ``layout`` how one lies in memory;
``bucket`` is the table; ``finite`` refuses what is not a number before it is sent.
"""
