"""POST /v1/predict: instances in, one object a row out."""

from collections.abc import Iterator
from typing import Any

import msgspec
from fastapi import APIRouter
from offramp.runtime.execution.answers import Ids
from offramp.server.dataplane import DataPlane, Encode
from offramp.server.patience import Patience
from offramp.server.protocols.hot import Handler
from offramp.server.protocols.openapi import documented, example_row
from offramp.server.protocols.reading import Asked, PredictRequest
from offramp.server.protocols.streaming import wants_lines
from offramp.server.query import Answer, Query
from offramp.server.request_id import id_of
from starlette.requests import Request
from starlette.responses import Response


class Prediction(msgspec.Struct, omit_defaults=True, gc=False):
    """One row's answer.

    label: -1, with class null, where the logits weren't numbers. confidence: probability that the label is
    right. abstain: true says don't rely on it. flops: what this row's blocks cost. involuntary: true where the row
    would have gone on, had max_exit, its deadline or an overload not ended it; not there where it is false.
    """

    label: int
    class_: str | None = msgspec.field(name="class")
    confidence: float | None
    exit: int
    exit_name: str
    abstain: bool
    flops: int
    involuntary: bool = False
    probabilities: list[float | None] | None = None


class Line(Prediction, kw_only=True):
    """A row's answer as soon as it is there, asked for by `Accept: application/x-ndjson`. index: of its instance."""

    index: int
    operating_point: str


class PredictResponse(msgspec.Struct, kw_only=True):
    """The rows' answers in the order of the instances."""

    predictions: list[Prediction]
    model: str
    version: str
    operating_point: str
    request_id: str


SCHEMAS = (PredictRequest, PredictResponse)


PATH = "/v1/predict"


def handler(plane: DataPlane) -> Handler:
    """What answers at PATH."""
    manifest, points, encoder = plane.manifest, plane.points, msgspec.json.Encoder()

    def query(asked: Asked, patience: Patience, request_id: str) -> tuple[Query, Encode]:
        made = plane.query(asked, patience, request_id)
        return made, lambda answer: encode(made, answer, request_id)

    def columns(answer: Answer) -> Iterator[tuple[Any, ...]]:
        """A prediction's fields, row by row, in their order."""
        classes, exits = manifest.classes, points.exits
        probabilities: list[Any] = [None] * len(answer)
        if answer.probabilities is not None:
            probabilities = answer.probabilities.tolist()
        columns = (answer.label, answer.confidence, answer.exit, answer.abstain, answer.flops, answer.involuntary)
        for label, confidence, exit, abstain, flops, involuntary, shares in zip(
            *[column.tolist() for column in columns], probabilities, strict=True
        ):
            name = classes[label] if label >= 0 else None
            yield label, name, confidence, exit, exits[exit], abstain, flops, involuntary, shares  # a NaN becomes null

    def lines(ids: Ids, answer: Answer) -> bytes:
        rows = zip(ids.tolist(), columns(answer), strict=True)
        point = answer.operating_point
        return encoder.encode_lines([Line(*row, index=k, operating_point=point) for k, row in rows])

    def encode(query: Query, answer: Answer, request_id: str) -> bytes:
        return encoder.encode(
            PredictResponse(
                predictions=[Prediction(*row) for row in columns(answer)],
                model=manifest.name,
                version=manifest.version,
                operating_point=answer.operating_point,
                request_id=request_id,
            )
        )

    async def predict(request: Request) -> Response:
        def finish(asked: Asked, patience: Patience) -> tuple[Query, Encode]:
            return query(asked, patience, id_of(request))

        if wants_lines(request.headers.get("accept", "")):
            return await plane.stream(request, "predict", finish, lines)
        return await plane.answer(request, "predict", finish)

    return predict


def routes(plane: DataPlane) -> APIRouter:
    router = APIRouter(tags=["predict"])
    manifest, points = plane.manifest, plane.points

    row: Any = {given.name: example_row(given) for given in manifest.inputs}
    if plane.raw.kind == "text":
        row = "a text"
    example = {"instances": [row], "operating_point": points.default}

    answer = handler(plane)

    @router.post(PATH, **documented(PredictRequest, PredictResponse, example))
    async def predict(request: Request) -> Response:
        """Classify rows. Each leaves at the first exit that is sure enough at the operating point."""
        return await answer(request)

    return router
