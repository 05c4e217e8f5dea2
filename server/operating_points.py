"""The operating points a server offers, and the route that lists them."""

import math
from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import APIRouter
from offramp.runtime.bundle import encode_number
from offramp.runtime.calibration_file import Calibration
from offramp.runtime.cascade import Cascade
from offramp.runtime.errors import InputError
from offramp.runtime.points import OperatingPoint
from starlette.responses import Response

_WHOLE = "", -1  # no point has that name


class OperatingPoints:
    """The bundle's operating points by name, each as a cascade over the same sessions.

    Where the cascade learns, they are those of the calibration in force. learning: what it has learnt, None where it
    doesn't. version: of the calibration that the last cascade came from, 0 for the bundle's own.
    """

    def __init__(self, cascade: Cascade) -> None:
        self.default = cascade.operating_point.name
        self.exits = [e.name for e in cascade.manifest.exits]
        self.learning = cascade.learning
        self.version = 0
        self._cascade = cascade
        self._own = cascade.calibration.points.get(self.default) != cascade.operating_point
        self._ready: dict[tuple[str, int], Cascade] = {}

    @property
    def points(self) -> Mapping[str, OperatingPoint]:
        """By name. Any thread may look."""
        return self._points_of(self._in_force[1])

    @property
    def _in_force(self) -> tuple[int, Calibration]:
        return (0, self._cascade.calibration) if self.learning is None else self.learning.in_force

    def _points_of(self, calibration: Calibration) -> Mapping[str, OperatingPoint]:
        if self._own:
            return {**calibration.points, self.default: self._cascade.operating_point}
        return calibration.points

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
        """The cascade at what `choose` chose. There are at most points × exits of them, so all are kept.

        One thread asks, the engine's event loop: in the others nothing changes.
        """
        version, calibration = self._in_force
        if version != self.version:
            self.version, self._ready = version, {}
        key = name, max_exit
        if key not in self._ready:
            point = calibration.stopping_at(self._points_of(calibration)[name], max_exit)
            self._ready[key] = self._at(point, calibration)
        return self._ready[key]

    def whole(self) -> Cascade:
        """The cascade for rows that are run to the end with every exit looked at."""
        if _WHOLE not in self._ready:
            open_ = OperatingPoint((*[0.0] * (len(self.exits) - 1), -math.inf)).out_of_reach()
            self._ready[_WHOLE] = self._at(open_, self._in_force[1])
        return self._ready[_WHOLE]

    def _at(self, point: OperatingPoint, calibration: Calibration) -> Cascade:
        """A cascade that keeps nothing by itself."""
        root = self._cascade
        return type(root)(root.bundle, calibration, point, root.executor, batch_rows=root.batch_rows)

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
