"""The operating points a server offers, and the route that lists them."""

from typing import Any

import msgspec
from fastapi import APIRouter
from offramp.runtime.bundle import encode_number
from offramp.runtime.cascade import Cascade
from offramp.runtime.errors import InputError
from starlette.responses import Response


class OperatingPoints:
    """The bundle's operating points by name, each as a cascade over the same sessions."""

    def __init__(self, cascade: Cascade) -> None:
        self.default = cascade.operating_point.name
        self.points = {**cascade.calibration.points, self.default: cascade.operating_point}
        self.exits = [e.name for e in cascade.manifest.exits]
        self._cascade = cascade
        self._ready: dict[tuple[str, int], Cascade] = {}

    def choose(self, name: str | None, max_exit: int | None) -> tuple[str, int]:
        """The point and the last exit for a request. Raises InputError naming the field that is wrong."""
        chosen = self.default if name is None else name
        if chosen not in self.points:
            raise InputError(f"operating_point is {chosen!r}, expected one of {list(self.points)}.")
        last = len(self.exits) - 1
        if max_exit is not None and not 0 <= max_exit <= last:
            raise InputError(f"max_exit is {max_exit}, expected 0 to {last} (the exits {self.exits}).")
        return chosen, last if max_exit is None else max_exit

    def cascade(self, name: str, max_exit: int) -> Cascade:
        """The cascade at what `choose` chose. There are at most points × exits of them, so all are kept."""
        key = name, max_exit
        if key not in self._ready:
            self._ready[key] = self._cascade.at(self._cascade.calibration.stopping_at(self.points[name], max_exit))
        return self._ready[key]

    def describe(self) -> dict[str, Any]:
        manifest = self._cascade.manifest
        return {
            "model": manifest.name,
            "version": manifest.version,
            "operating_point": self.default,
            "exits": self.exits,
            "classes": manifest.classes,
            "raw_rows": None if manifest.preprocess is None else type(manifest.preprocess).__name__.lower(),
            "operating_points": {
                name: {
                    "thresholds": [encode_number(t) for t in point.thresholds],
                    "abstain_below": encode_number(point.abstain_below),
                    "expected": dict(point.expected),
                    "provenance": dict(point.provenance),
                }
                for name, point in self.points.items()
            },
        }


def routes(points: OperatingPoints) -> APIRouter:
    router = APIRouter(tags=["predict"])

    @router.get("/v1/operating-points", summary="The operating points, the exits, and which point is in use")
    async def operating_points() -> Response:
        return Response(msgspec.json.encode(points.describe()), media_type="application/json")

    return router
