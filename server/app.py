"""The HTTP application over one cascade."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI
from offramp.runtime.bundle import own_version
from offramp.runtime.cascade import Cascade
from offramp.runtime.errors import InputError
from offramp.runtime.execution.cpu.session import available_threads
from offramp.server import metrics, operating_points, pages
from offramp.server.dataplane import DataPlane
from offramp.server.decoding.decoders import Decoders
from offramp.server.engine import BatchingEngine, Overload
from offramp.server.memory import Memory
from offramp.server.protocols import inference, predict
from offramp.server.protocols.error_responses import add_error_handlers
from offramp.server.protocols.head import Heads
from offramp.server.protocols.hot import add_hot_routes
from offramp.server.protocols.names import Names
from offramp.server.protocols.openapi import add_schemas
from offramp.server.protocols.raw import RawRows
from offramp.server.protocols.reading import Limits
from offramp.server.recalibration.keeping import Keeping
from offramp.server.recalibration.recalibrating import online_of, recalibrating
from offramp.server.request_id import RequestIds
from offramp.server.settings import Settings


def create_app(bundle: Cascade | Settings | str | Path | None = None, settings: Settings | None = None) -> FastAPI:
    """The application that serves a bundle.

    bundle: a loaded cascade, which stays the caller's to close; a bundle's folder; or settings that name one.
        With nothing, as for `uvicorn --factory offramp.server:create_app`, the environment names it.
    settings: limits and timeouts; from the environment by default. Where to listen is the caller's business.

    Raises what Cascade.load raises, and InputError for a setting that this bundle has no answer to.
    """
    if isinstance(bundle, Settings):
        settings, bundle = bundle, None
    settings = settings or Settings.of()
    given = isinstance(bundle, Cascade)
    cascade = bundle if isinstance(bundle, Cascade) else load(bundle or settings.bundle, settings)
    if settings.recalibration is not None and cascade.learning is None:
        raise InputError("recalibration is set, but this cascade keeps nothing: load it with recalibration=Online(…).")
    points = operating_points.OperatingPoints(cascade)
    counters = metrics.Metrics(cascade.manifest, points.points)
    keeping = None
    if cascade.learning is not None:
        keeping = Keeping(cascade.learning, cascade.manifest)
    engine = BatchingEngine(
        points,
        counters,
        lanes=settings.lanes or _lanes(settings),
        max_queued_rows=settings.max_queued_rows,
        batching=settings.batching,
        stalled_after=settings.stalled_after,
        overload=_overload(settings, points),
        keeping=keeping,
    )
    memory = Memory(settings.max_bytes_in_flight)
    raw = RawRows(cascade, settings.max_decoded_bytes)
    limits = Limits(settings.max_body_bytes, settings.max_decoded_bytes, settings.row_limit)
    decoders = Decoders(cascade.manifest, limits)
    plane = DataPlane(cascade.manifest, points, engine, counters, settings, memory, raw, limits, decoders)

    learns = recalibrating(plane, keeping)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with learns.beside():
            yield
        await engine.close(settings.drain_timeout)
        decoders.close()
        counters.close()
        if not given:
            cascade.close()

    app = FastAPI(
        title=f"offramp: {cascade.manifest.name}",
        version=own_version(),
        description=f"{cascade.manifest.name} {cascade.manifest.version}, a classifier with {len(points.exits)} exits.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    app.state.decoders = decoders
    app.state.engine = engine
    app.state.follower = learns.follower
    app.state.keeping = keeping
    app.state.memory = memory
    app.state.metrics = counters
    app.state.operating_points = points
    add_error_handlers(app)
    app.add_middleware(Heads)
    app.add_middleware(Names, manifest=cascade.manifest)
    app.add_middleware(RequestIds)
    for router in (
        learns.routes,
        predict.routes(plane),
        inference.routes(plane),
        operating_points.routes(points),
        metrics.routes(counters),
        pages.routes(),
    ):
        app.include_router(router)
    hot = {predict.PATH: predict.handler(plane), **dict.fromkeys(inference.paths(plane), inference.handler(plane))}
    add_hot_routes(app, hot)
    add_schemas(app, [*predict.SCHEMAS, *inference.SCHEMAS, *learns.schemas])
    return app


def _lanes(settings: Settings) -> int:
    """One batch's answers are made out while the other runs: a fifth more rows a second on two cores."""
    return 2 if settings.device == "cpu" and available_threads() >= 2 * settings.workers else 1


def _overload(settings: Settings, points: operating_points.OperatingPoints) -> Overload | None:
    name = settings.overload_operating_point
    if name is None:
        return None
    if name not in points.points:
        raise InputError(f"overload_operating_point is {name!r}, expected one of {list(points.points)}.")
    return Overload(name, settings.overload_rows)


def load(bundle: str | Path | None, settings: Settings) -> Cascade:
    if bundle is None:
        raise InputError("bundle is not set: name the bundle's folder: offramp serve BUNDLE, or OFFRAMP_BUNDLE.")
    return Cascade.load(
        bundle,
        device=settings.device,
        operating_point=settings.operating_point,
        threads=settings.threads,
        spin_us=settings.spin_us,
        recalibration=online_of(settings),
    )
