"""Peers on a Ray cluster: launched by ``ragtag run --on ray``, or by a Ray program (``ragtag.ray``)."""
