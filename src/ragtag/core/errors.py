"""Errors that more than one room raises."""

from __future__ import annotations


class NotFinite(FloatingPointError):
    """NaN or infinity in what is to be sent; the message says where: the first tensor, or the first entry."""
