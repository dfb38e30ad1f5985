"""Replicas that average gradients, kept alike: compared now and then, and made the same.

``plan`` says how often and which version is right, ``units`` are the parts that are compared, ``rows`` their
datagrams, ``late`` what of sparse rounds is still to come; ``aligner`` does it.
"""
