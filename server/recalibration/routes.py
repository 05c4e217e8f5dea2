"""POST /v1/feedback takes labels; /v1/recalibration says what came of them, and lets a person decide."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter
from msgspec import UNSET, UnsetType
from offramp.runtime.errors import InputError, NotLeader, StoreError
from offramp.runtime.online.learning import Learning
from offramp.runtime.online.store.labelling import Outcome
from offramp.runtime.online.store.served import MOST_CHARACTERS
from offramp.runtime.online.window import LEAST_ASKED
from offramp.server.dataplane import DataPlane
from offramp.server.errors import Conflict, Unavailable
from offramp.server.protocols.openapi import documented
from offramp.server.recalibration.follower import Follower
from offramp.server.recalibration.keeping import KEPT_WITHIN
from offramp.server.recalibration.risk_metrics import RiskMetrics
from starlette.requests import Request
from starlette.responses import Response

T = TypeVar("T")
ASSUMES = (
    "These figures hold only where a label comes whether or not the answer was right and whoever gave it, and for "
    "those rows alone that labels are asked for."
)
_DECISIONS = 100
_AGAIN = 1.5 * KEPT_WITHIN  # seconds until a row that nobody knows is asked for once more
_log = logging.getLogger("uvicorn.error.offramp")


class Label(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What a row was. request_id: the answer's, or its header X-Request-ID. index: of the row in its request. label: a
    class number or a class name. asked: the probability with which the label was sought, where it depends on the row's
    answer: 0.1 if one in ten of the sure ones is looked at."""

    request_id: str
    label: int | str
    index: int = 0
    asked: float = 1.0


class FeedbackRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What answered rows were: one of them, by request_id, index (0 if it isn't said), label and asked (1 if it isn't
    said), or many in labels."""

    request_id: str | UnsetType = UNSET
    label: int | str | UnsetType = UNSET
    index: int = 0
    asked: float = 1.0
    labels: list[Label] | UnsetType = UNSET

    def all(self) -> list[Label]:
        """Whichever way they came. Raises InputError."""
        if self.labels is not UNSET:
            if self.request_id is not UNSET or self.label is not UNSET:
                raise InputError("labels stands beside request_id or label, expected one or the other.")
            return self.labels
        if self.request_id is UNSET or self.label is UNSET:
            missing = "request_id" if self.request_id is UNSET else "label"
            raise InputError(f"{missing} is missing, expected request_id and label, or labels: a list of such.")
        return [Label(request_id=self.request_id, label=self.label, index=self.index, asked=self.asked)]


class FeedbackResponse(msgspec.Struct, kw_only=True):
    """outcomes: what became of each label, in their order: accepted; duplicate, the row has this very label;
    conflicting, it has another, which stays; late, it was served and is kept no longer; unknown, no such row."""

    outcomes: list[str]


class DeleteResponse(msgspec.Struct, kw_only=True):
    """rows: how many were kept of the request, and aren't any more."""

    rows: int


class Person(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """by: who decides, for the log."""

    by: str


class PromoteRequest(Person, forbid_unknown_fields=True, kw_only=True):
    """version: to put in force; 0 is the bundle's own calibration. by: who decides, for the log."""

    version: int


class FreezeRequest(Person, forbid_unknown_fields=True, kw_only=True):
    """frozen: whether nothing may change by itself. by: who decides, for the log."""

    frozen: bool = True


class StateResponse(msgspec.Struct, kw_only=True):
    """version: of the calibration in force; 0 is the bundle's own. leads: whether this engine decides, and has figures
    by operating point. assumes: what figures and promises rest on. versions, decisions: newest last."""

    model: str
    version: int
    mode: str
    frozen: bool
    leads: bool
    assumes: str
    store: dict[str, Any]
    figures: dict[str, Any]
    versions: list[dict[str, Any]]
    decisions: list[dict[str, Any]]


SCHEMAS = (FeedbackRequest, FeedbackResponse, DeleteResponse, Person, PromoteRequest, FreezeRequest, StateResponse)


def routes(plane: DataPlane, learning: Learning, follower: Follower, metrics: RiskMetrics) -> APIRouter:
    router = APIRouter(tags=["recalibration"])
    example: Any = {"request_id": "0f3a…", "index": 0, "label": plane.manifest.classes[0]}
    person = {"by": "a name"}

    @router.post("/v1/feedback", **documented(FeedbackRequest, FeedbackResponse, example))
    async def feedback(request: Request) -> Response:
        """Say what answered rows were. A label counts from then on; the first one of a row stays."""
        given = await plane.read(request, FeedbackRequest)
        labels = given.all()
        try:
            for k, one in enumerate(labels):
                _check(one, f"labels[{k}].")
            outcomes = await give(labels, _key(request))
        except InputError as error:
            if given.labels is not UNSET:
                raise
            said = str(error).replace("labels[0].", "", 1).replace("labels[0]", "label", 1)
            raise InputError(said) from error
        unknown = [k for k, outcome in enumerate(outcomes) if outcome == Outcome.UNKNOWN]
        if unknown:  # another engine may have answered them just now
            await asyncio.sleep(_AGAIN)
            for k, outcome in zip(unknown, await give([labels[k] for k in unknown], _key(request)), strict=True):
                outcomes[k] = outcome
        metrics.labelled(outcomes)
        return _json(FeedbackResponse(outcomes=[str(one) for one in outcomes]))

    @router.delete("/v1/feedback/{request_id:path}", **documented(None, DeleteResponse))
    async def delete(request_id: str) -> Response:
        """Forget all that is kept of a request."""
        return _json(DeleteResponse(rows=await _off_loop(lambda: learning.forget([request_id]))))

    @router.get("/v1/recalibration", **documented(None, StateResponse))
    async def state(decisions: str = str(_DECISIONS)) -> Response:
        """What is in force, what was found, and why."""
        if not decisions.isdecimal() or not 0 < int(decisions) <= 10_000:
            raise InputError(f"decisions is {decisions[:40]!r}, expected how many of the newest, 1 to 10000.")
        return _json(await _off_loop(lambda: described(int(decisions))))

    @router.post("/v1/recalibration/promote", **documented(PromoteRequest, StateResponse, {"version": 1, **person}))
    async def promote(request: Request) -> Response:
        """Put a version in force."""
        asked = await plane.read(request, PromoteRequest)
        return await decided(lambda: learning.promote(asked.version, by=_named(asked)))

    @router.post("/v1/recalibration/rollback", **documented(Person, StateResponse, person))
    async def rollback(request: Request) -> Response:
        """Put in force what was before the version that is now."""
        asked = await plane.read(request, Person)
        return await decided(lambda: learning.rollback(by=_named(asked)))

    @router.post("/v1/recalibration/freeze", **documented(FreezeRequest, StateResponse, {"frozen": True, **person}))
    async def freeze(request: Request) -> Response:
        """Let nothing change by itself, or let it again."""
        asked = await plane.read(request, FreezeRequest)
        return await decided(lambda: learning.freeze(asked.frozen, by=_named(asked)))

    async def give(labels: list[Label], key: str) -> list[Outcome]:
        if not labels:
            return []
        names, numbers = [one.request_id for one in labels], [one.index for one in labels]
        said, asked = [one.label for one in labels], [one.asked for one in labels]
        return await _off_loop(lambda: learning.label(names, numbers, said, key, asked))

    async def decided(decide: Callable[[], Any]) -> Response:
        await _off_loop(decide)
        return _json(await _off_loop(lambda: described(_DECISIONS)))

    def described(decisions: int) -> StateResponse:
        now = learning.state()
        return StateResponse(
            model=plane.manifest.name,
            version=now.calibration,
            mode=now.mode,
            frozen=now.frozen,
            leads=follower.leads,
            assumes=ASSUMES,
            store={"alarm": learning.alarm or follower.failing, "kept": learning.kept, "dropped": learning.dropped},
            figures=follower.describe(),
            versions=[
                {"version": one.version, "parent": one.parent, "time": one.time, "method": one.method}
                for one in learning.versions()
            ],
            decisions=[asdict(one) for one in learning.decisions(decisions)],
        )

    return router


def _check(one: Label, where: str) -> None:
    """Raises InputError naming the field that can't be meant."""
    if not 0 < len(one.request_id) <= MOST_CHARACTERS:
        said = f"{one.request_id!r:.60}, {len(one.request_id)} characters"
        raise InputError(f"{where}request_id is {said}: expected 1 to {MOST_CHARACTERS}.")
    if not 0 <= one.index < 2**31:
        raise InputError(f"{where}index is {one.index}, expected a row's place in its request, from 0 on.")
    if not LEAST_ASKED <= one.asked <= 1:
        raise InputError(f"{where}asked is {one.asked}, expected a probability from {LEAST_ASKED:g} to 1.")


async def _off_loop(work: Callable[[], T]) -> T:
    """Databases may take their time."""
    try:
        return await asyncio.to_thread(work)
    except NotLeader as error:
        raise Conflict(str(error)) from error
    except StoreError as error:  # which says where it lies on this machine
        _log.warning("%s", error)
        raise Unavailable("the store of answered rows can't be read or written at present.") from error


def _key(request: Request) -> str:
    """Who sends labels: by what it authorises itself with, else from where it comes. Only a number of it is kept."""
    given = request.headers.get("authorization")
    return given or (request.client.host if request.client else "")


def _named(asked: Person) -> str:
    if not asked.by.strip():
        raise InputError("by is empty, expected the name of who decides.")
    return asked.by


def _json(made: Any) -> Response:
    return Response(msgspec.json.encode(made), media_type="application/json")
