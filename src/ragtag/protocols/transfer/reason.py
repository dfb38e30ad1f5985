"""Why a newcomer did without a donor, or got no state at all: what a user reads."""

from __future__ import annotations

from collections.abc import Iterable

from ragtag.protocols.transfer.donor import Donor, DonorState
from ragtag.protocols.transfer.types import Outcome

_SILENT = "did not answer; is its port open to this machine?"


def dropped(donors: Iterable[Donor]) -> dict[str, str]:
    """Who was given up, or was lost and has given nothing since, and why."""
    lost = (DonorState.OUT, DonorState.AWAY, DonorState.CONNECTING)
    return {d.name: d.why or _SILENT for d in donors if d.state in lost or d.tries > 0}


def reason(donors: Iterable[Donor], outcome: Outcome, asked_round: int | None, expired: bool) -> str:
    """Why there is no state, donor by donor; those that say the same are named together."""
    said: dict[str, list[str]] = {}
    for donor in donors:
        said.setdefault(_complaint(donor, asked_round), []).append(donor.name)
    lines = "; ".join(f"{', '.join(names)}: {why}" for why, names in said.items())
    offer = outcome.offer
    how_far = f"{outcome.came} of {offer.n_chunks} chunks came" if offer else "no chunk came"
    if expired:
        return f"the state was not complete after {outcome.took_s:.3g} s ({how_far}). {lines}"
    return f"no donor is left that could give the state ({how_far}). {lines}"


def _complaint(donor: Donor, asked_round: int | None) -> str:
    if donor.state is DonorState.CONNECTING:
        return donor.why or _SILENT
    if donor.state is DonorState.ASKED and donor.offer is None:
        return (
            f"had finished round {donor.round}, and gave no snapshot of round {asked_round} or later; is it "
            "still training?"
        )
    return donor.why or f"gave {donor.given} bytes"
