""" "Understanding Top-k Sparsification in Distributed Deep Learning" (Shi et al.), and sparse outer steps.

``plan`` says which runs, ``training`` is one run in step, ``local`` one with local steps.
"""
