"""How a process learns its place in a crew: from ``ragtag run``, from torchrun, or not at all.

``ragtag run`` tells its peers everything in ``RAGTAG_*`` variables. torchrun tells rank, size and where a
store is, through which the peers tell each other their addresses.
"""

from ragtag.app.environment.addresses import Address, format_address, looked_up, parse_address
from ragtag.app.environment.announce import Announcement, Announcer, Reached, read_announcements
from ragtag.app.environment.place import VARIABLES, Place, PlaceError, Rendezvous, place_from_environment
from ragtag.app.environment.rendezvous import exchange_addresses, reachable_host

__all__ = [
    "VARIABLES",
    "Address",
    "Announcement",
    "Announcer",
    "Place",
    "PlaceError",
    "Rendezvous",
    "Reached",
    "exchange_addresses",
    "format_address",
    "looked_up",
    "parse_address",
    "place_from_environment",
    "reachable_host",
    "read_announcements",
]
