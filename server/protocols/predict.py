"""POST /v1/predict: instances in, one object a row out."""

from typing import Any

import msgspec
from fastapi import APIRouter
from offramp.server.body import Body
from offramp.server.body import decode as decode_json
from offramp.server.dataplane import DataPlane, Encode, check_timeout
from offramp.server.patience import Patience
from offramp.server.protocols.openapi import documented, example_row
from offramp.server.protocols.tensors import groups_of_instances
from offramp.server.query import Answer, Group, Query
from offramp.server.request_id import id_of
from starlette.requests import Request
from starlette.responses import Response


class PredictRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Rows to classify, and how.

    instances: one a row; an object with the model's inputs by name, or the bare value of a single input. If the bundle
    has preprocessing, a row may also be a text ("…" or {"text": "…"}), or a PNG or JPEG file in base64 ("…" or
    {"b64": "…"}). Rows may differ in length. max_exit: the last exit a row may leave from. timeout: seconds, then 503.
    probabilities: answer with every class's probability. What isn't required may also be null.
    """

    instances: list[Any]
    operating_point: str | None = None
    max_exit: int | None = None
    timeout: float | None = None
    probabilities: bool | None = None


class Prediction(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One row's answer.

    label: -1, with class null, where the logits weren't numbers. confidence: probability that the label is
    right. abstain: true says don't rely on it. flops: what this row's blocks cost.
    """

    label: int
    class_: str | None = msgspec.field(name="class")
    confidence: float | None
    exit: int
    exit_name: str
    abstain: bool
    flops: int
    probabilities: list[float | None] | None = None


class PredictResponse(msgspec.Struct, kw_only=True):
    """The rows' answers in the order of the instances."""

    predictions: list[Prediction]
    model: str
    version: str
    operating_point: str
    request_id: str


SCHEMAS = (PredictRequest, PredictResponse)


def routes(plane: DataPlane) -> APIRouter:
    router = APIRouter(tags=["predict"])
    manifest, points, raw = plane.manifest, plane.points, plane.raw

    row: Any = {given.name: example_row(given) for given in manifest.inputs}
    if raw.kind == "text":
        row = "a text"
    example = {"instances": [row], "operating_point": points.default}

    def groups(instances: list[Any], patience: Patience) -> tuple[Group, ...]:
        return (
            raw.of_instances(instances, patience) if raw.meant(instances) else groups_of_instances(instances, manifest)
        )

    def decode(received: Body, request_id: str) -> tuple[Query, Encode]:
        asked = decode_json(received, PredictRequest, plane.settings.max_decoded_bytes)
        plane.check_rows(len(asked.instances))
        name, max_exit = points.choose(asked.operating_point, asked.max_exit)
        query = Query(
            groups=groups(asked.instances, received.patience),
            rows=len(asked.instances),
            operating_point=name,
            max_exit=max_exit,
            probabilities=bool(asked.probabilities),
            timeout=check_timeout(asked.timeout),
        )
        return query, lambda answer: encode(query, answer, request_id)

    def encode(query: Query, answer: Answer, request_id: str) -> bytes:
        classes, exits = manifest.classes, points.exits
        probabilities: list[Any] = [None] * len(answer)
        if answer.probabilities is not None:
            probabilities = answer.probabilities.tolist()
        columns = (answer.label, answer.confidence, answer.exit, answer.abstain, answer.flops)
        return msgspec.json.encode(
            PredictResponse(
                predictions=[
                    Prediction(
                        label=label,
                        class_=classes[label] if label >= 0 else None,
                        confidence=confidence,  # NaN is written as null
                        exit=exit,
                        exit_name=exits[exit],
                        abstain=abstain,
                        flops=flops,
                        probabilities=shares,
                    )
                    for label, confidence, exit, abstain, flops, shares in zip(
                        *(column.tolist() for column in columns), probabilities, strict=True
                    )
                ],
                model=manifest.name,
                version=manifest.version,
                operating_point=query.operating_point,
                request_id=request_id,
            )
        )

    @router.post("/v1/predict", **documented(PredictRequest, PredictResponse, example))
    async def predict(request: Request) -> Response:
        """Classify rows. Each leaves at the first exit that is sure enough at the operating point."""
        return await plane.answer(request, lambda received: decode(received, id_of(request)))

    return router
