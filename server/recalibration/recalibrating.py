"""A server with recalibration or without: its routes, and what runs beside it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any

from fastapi import APIRouter
from offramp.runtime.online.limits import Limits
from offramp.runtime.online.online import Online
from offramp.server.dataplane import DataPlane
from offramp.server.recalibration.keeping import Keeping
from offramp.server.settings import Settings

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
        limits=Limits(
            rows=settings.kept_rows,
            bytes=settings.kept_bytes,
            days=settings.kept_days,
            durable=settings.kept_durably,
        ),
    )


def recalibrating(plane: DataPlane, keeping: Keeping | None) -> tuple[APIRouter, Sequence[type[Any]], Beside]:
    """The routes, their structs, and what runs as long as the server does. keeping: None where nothing is kept."""
    learning = plane.points.learning
    if learning is None or keeping is None:
        from offramp.server.recalibration.refusals import refusals

        return refusals(), (), _nothing
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

    return routes(plane, learning, follower, metrics), SCHEMAS, beside


@asynccontextmanager
async def _nothing() -> AsyncIterator[None]:
    yield
