"""Ragtag in a Ray program: a crew of its tasks and actors.

    crew = ragtag.ray.crew(4)
    workers = [Trainer.options(max_restarts=3).remote() for _ in range(4)]
    ray.get([worker.train.remote(crew) for worker in workers])    # each calls crew.join()

Needs ``pip install 'ragtag[ray]'``. To run a script as it is on a cluster: ``ragtag run --on ray``.
"""

from __future__ import annotations

from ragtag.app.on_ray.library import NoRay
from ragtag.app.on_ray.meeting import RayCrew
from ragtag.app.on_ray.meeting import make as crew

__all__ = ["NoRay", "RayCrew", "crew"]
