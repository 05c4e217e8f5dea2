"""The Open Inference Protocol, version 2, in JSON: what KServe and Triton clients speak."""

from typing import Annotated, Any

import msgspec
import numpy as np
from fastapi import APIRouter, Depends, Path
from numpy.typing import NDArray
from offramp.runtime.bundle import Input, own_version
from offramp.server.dataplane import DataPlane, Encode
from offramp.server.errors import NotFound, Unavailable
from offramp.server.patience import Patience
from offramp.server.protocols.hot import Handler
from offramp.server.protocols.names import segment
from offramp.server.protocols.openapi import documented, example_row
from offramp.server.protocols.reading import DATATYPES, OUTPUTS, Asked, InferRequest
from offramp.server.query import Answer, Query
from offramp.server.request_id import id_of
from starlette.requests import Request
from starlette.responses import Response


class OutputTensor(msgspec.Struct, kw_only=True):
    name: str
    datatype: str
    shape: list[int]
    data: list[Any]


class InferResponse(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The outputs, and the id of the request if it had one."""

    model_name: str
    model_version: str
    outputs: list[OutputTensor]
    parameters: dict[str, Any] = {}
    id: str | None = None


SCHEMAS = (InferRequest, InferResponse)


def handler(plane: DataPlane) -> Handler:
    """What answers an inference request, whatever its path."""
    manifest = plane.manifest

    def query(asked: Asked, patience: Patience, request_id: str) -> tuple[Query, Encode]:
        made, name, outputs = plane.query(asked, patience, request_id), asked.fields.id, asked.fields.outputs
        return made, lambda answer: encode(name, outputs, made, answer)

    def encode(id: str | None, outputs: list[str], query: Query, answer: Answer) -> bytes:
        return msgspec.json.encode(
            InferResponse(
                model_name=manifest.name,
                model_version=manifest.version,
                id=id,
                parameters={"operating_point": answer.operating_point},
                outputs=[output(name, answer, manifest.classes) for name in outputs],
            )
        )

    async def infer(request: Request) -> Response:
        def finish(asked: Asked, patience: Patience) -> tuple[Query, Encode]:
            return query(asked, patience, id_of(request))

        return await plane.answer(request, "binary" if _is_binary(request) else "infer", finish)

    return infer


def paths(plane: DataPlane) -> list[str]:
    """Where this model's requests go, if its name and version are plain segments of a URL."""
    model, version = plane.manifest.name, plane.manifest.version
    if segment(model) != model or segment(version) != version:
        return []
    return [f"/v2/models/{model}/infer", f"/v2/models/{model}/versions/{version}/infer"]


def routes(plane: DataPlane) -> APIRouter:
    manifest = plane.manifest
    described = {
        "name": manifest.name,
        "versions": [manifest.version],
        "platform": "offramp_onnx",
        "inputs": [
            {
                "name": given.name,
                "datatype": DATATYPES[given.dtype],
                "shape": [size if isinstance(size, int) else -1 for size in given.shape],
            }
            for given in manifest.inputs
        ],
        "outputs": [
            {
                "name": name,
                "datatype": datatype,
                "shape": [-1, len(manifest.classes)] if name == "probabilities" else [-1],
            }
            for name, datatype in OUTPUTS.items()
        ],
    }

    example = {"inputs": [example_tensor(given) for given in manifest.inputs]}

    async def check_model(request: Request, model: Annotated[str, Path(examples=[manifest.name])]) -> None:
        version = request.path_params.get("version")
        if model not in (manifest.name, segment(manifest.name)):
            raise NotFound(f"no model {model!r}: this server has {manifest.name!r}.")
        if version not in (None, manifest.version, segment(manifest.version)):
            raise NotFound(f"model {model!r} has no version {version!r}: this server has {manifest.version!r}.")

    router = APIRouter(tags=["open inference protocol"])
    of_model = APIRouter(prefix="/v2/models/{model}", dependencies=[Depends(check_model)])

    @router.get("/v2", summary="Server metadata")
    async def server() -> Response:
        return _json({"name": "offramp", "version": own_version(), "extensions": []})

    @router.get("/v2/health/live", tags=["operations"], summary="200 while the process answers")
    async def live() -> Response:
        return _json({"live": True})

    @router.get("/v2/health/ready", tags=["operations"], summary="200 while requests are taken, 503 while draining")
    async def ready() -> Response:
        check_ready()
        return _json({"ready": True})

    def check_ready() -> None:
        if not plane.engine.ready:
            raise Unavailable("not ready: the server is shutting down, or a batch has been running for too long.")

    @of_model.get("/ready", summary="Whether the model takes requests")
    @of_model.get("/versions/{version}/ready", include_in_schema=False)
    async def model_ready() -> Response:
        check_ready()
        return _json({"name": manifest.name, "ready": True})

    @of_model.get("", summary="Model metadata: inputs, outputs, versions")
    @of_model.get("/versions/{version}", include_in_schema=False)
    async def model_metadata() -> Response:
        return _json(described)

    answer = handler(plane)

    @of_model.post("/infer", **documented(InferRequest, InferResponse, example))
    @of_model.post("/versions/{version}/infer", include_in_schema=False)
    async def infer(request: Request) -> Response:
        """Classify the rows of tensors."""
        return await answer(request)

    router.include_router(of_model)
    return router


def example_tensor(given: Input) -> dict[str, Any]:
    """An input of one row."""
    row = np.asarray(example_row(given), given.dtype)
    batch = np.expand_dims(row, given.batch_axis)
    return {
        "name": given.name,
        "shape": list(batch.shape),
        "datatype": DATATYPES[given.dtype],
        "data": batch.ravel().tolist(),
    }


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _is_binary(request: Request) -> bool:
    return "inference-header-content-length" in request.headers


def output(name: str, answer: Answer, classes: list[str]) -> OutputTensor:
    """One output of an answer. A row whose logits weren't numbers has the label -1 and the class ""."""
    if name == "class":
        return OutputTensor(
            name=name,
            datatype="BYTES",
            shape=[len(answer)],
            data=[classes[label] if label >= 0 else "" for label in answer.label.tolist()],
        )
    values: NDArray[Any] = getattr(answer, name)
    return OutputTensor(name=name, datatype=OUTPUTS[name], shape=list(values.shape), data=values.tolist())
