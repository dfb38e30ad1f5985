""" "Understanding Top-k Sparsification in Distributed Deep Learning" (Shi et al.), and sparse outer steps.

``plan`` has the runs. ``training`` is one run in lockstep, ``local`` one with local steps.
"""
