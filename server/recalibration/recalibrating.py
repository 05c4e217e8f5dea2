"""A server with recalibration or without: its routes, and what runs beside it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from offramp.runtime.online.online import Limits, Online
from offramp.server.dataplane import DataPlane
from offramp.server.recalibration.keeping import KEPT_WITHIN, Keeping
from offramp.server.settings import Settings

if TYPE_CHECKING:
    from offramp.server.recalibration.follower import Follower

Beside = Callable[[], AbstractAsyncContextManager[None]]


def online_of(settings: Settings) -> Online | None:
    """How a server's cascade learns, as its settings say. Raises InputError."""
    if settings.recalibration is None:
        return None
    return Online(
        settings.recalibration,
        mode=settings.recalibration_mode,
        rows=settings.recalibration_rows,
        share=settings.recalibration_share,
        shadow=settings.recalibration_shadow,
        limits=Limits(
            rows=settings.kept_rows,
            bytes=settings.kept_bytes,
            days=settings.kept_days,
            unflushed=settings.kept_unflushed,
            seconds=KEPT_WITHIN,
            durable=settings.kept_durably,
        ),
    )


@dataclass(frozen=True)
class Recalibrating:
    """routes, and the structs that they speak in. beside: what runs as long as the server does. follower: see there."""

    routes: APIRouter
    schemas: Sequence[type[Any]] = ()
    beside: Beside = nullcontext
    follower: "Follower | None" = None


def recalibrating(plane: DataPlane, keeping: Keeping | None) -> Recalibrating:
    """What a server does about labels. keeping: None where nothing is kept."""
    learning = plane.points.learning
    if learning is None or keeping is None:
        from offramp.server.recalibration.refusals import refusals

        return Recalibrating(refusals())
    # The store needs the extra `online`.
    from offramp.server.recalibration.follower import Follower
    from offramp.server.recalibration.risk_metrics import RiskMetrics
    from offramp.server.recalibration.routes import SCHEMAS, routes

    metrics = RiskMetrics(plane.metrics, learning.method, len(plane.manifest.exits))
    follower = Follower(learning, keeping, metrics)

    @asynccontextmanager
    async def beside() -> AsyncIterator[None]:
        following = asyncio.create_task(follower.run())
        try:
            yield
        finally:
            following.cancel()
            with suppress(asyncio.CancelledError):
                await following
            await keeping.close()

    return Recalibrating(routes(plane, learning, follower, metrics), SCHEMAS, beside, follower)
