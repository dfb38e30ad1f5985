"""A live peer's state given to newcomers, and fetched from members: what ``training.state`` asks, over
TCP.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass

from ragtag.app.invitation.token import Credential
from ragtag.core.types import Noted, PeerId
from ragtag.network.transfer.donor import DonorServer
from ragtag.network.transfer.fetch import Donor, fetch_state
from ragtag.protocols.membership.passes import Passes, proof_of
from ragtag.protocols.membership.roster import Holder
from ragtag.protocols.transfer.snapshots import Shelf
from ragtag.protocols.transfer.types import Fetched, Need
from ragtag.training.state.keeper import Draw, layout_hash


class PassProver:
    """Proves to donors whose process this is; asks the same of newcomers (``protocols.transfer.wire``)."""

    def __init__(self, credential: Credential, passes: Passes) -> None:
        self._credential, self._passes = credential, passes

    def prove(self, what: bytes) -> bytes:
        """That this process is its person's, for ``what`` alone. No member is called ""."""
        return proof_of(self._credential.shown, self._credential.secret, "", 0, what)

    def proven(self, what: bytes, proof: bytes) -> bool:
        """Whether that is good, and the person may be in the crew."""
        return self._passes.proven("", 0, what, proof, time.time())


@dataclass(slots=True)
class LiveDonors:
    """The members that give their state, each asked over a connection of its own (``Donors`` of the keeper).

    key: the crew's.
    seats: the members that may give it, by seat.
    persons: in a crew that takes persons, whose process this is.
    """

    key: bytes
    seats: Callable[[], Mapping[PeerId, Holder]]
    persons: PassProver | None = None

    def ask(
        self,
        need: Need,
        deadline_s: float,
        *,
        behind: Collection[PeerId],
        draw: Draw,
        noted: Callable[[str, str, str], None],
    ) -> Future[Fetched | None]:
        """Get a state in a thread of its own, which ends by the deadline."""
        able = [
            Donor(holder.name, (holder.card.host, holder.card.state_port))
            for seat, holder in sorted(self.seats().items())
            if seat not in behind and holder.live and holder.card.trains and holder.card.state_port
        ]
        donors = draw(able)
        future: Future[Fetched | None] = Future()

        def fetch() -> None:
            try:
                fetched = fetch_state(
                    self.key,
                    donors,
                    schema=need.schema,
                    deadline_s=deadline_s,
                    layout_hash_of=layout_hash,
                    on_note=noted,
                    blob_bytes_max=need.blob_bytes_max,
                    persons=self.persons,
                )
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(fetched)

        if donors:
            threading.Thread(target=fetch, name="ragtag-state", daemon=True).start()
        else:
            future.set_result(None)
        return future


def start_donor(
    key: bytes,
    host: str,
    shelf: Shelf,
    tell: Callable[[Noted], None],
    persons: PassProver | None = None,
) -> DonorServer:
    """Begin to give this peer's state to newcomers, on a free port."""

    def on_note(what: str, address: str, detail: str) -> None:
        tell(Noted(f"donor: {what}", -1, f"{address} {detail}".strip()))

    server = DonorServer(key, shelf, (host, 0), on_note=on_note, persons=persons)
    server.start()
    return server
