"""The Open Inference Protocol, version 2, in JSON: what KServe and Triton clients speak."""

import math
from typing import Annotated, Any

import msgspec
import numpy as np
from fastapi import APIRouter, Depends, Path
from numpy.typing import NDArray
from offramp.runtime.bundle import Input, own_version
from offramp.runtime.errors import InputError
from offramp.server.body import Body
from offramp.server.body import decode as decode_json
from offramp.server.dataplane import DataPlane, Encode, check_timeout
from offramp.server.errors import NotFound, NotSupported, Unavailable
from offramp.server.patience import Patience
from offramp.server.protocols.names import segment
from offramp.server.protocols.openapi import documented, example_row
from offramp.server.protocols.tensors import group_of_arrays, numbers
from offramp.server.query import DEFAULT_PRIORITY, PRIORITIES, Answer, Group, Query
from starlette.requests import Request
from starlette.responses import Response

DTYPES = {
    "BOOL": "bool", "INT8": "int8", "INT16": "int16", "INT32": "int32", "INT64": "int64",
    "UINT8": "uint8", "UINT16": "uint16", "UINT32": "uint32", "UINT64": "uint64",
    "FP16": "float16", "FP32": "float32", "FP64": "float64",
}  # fmt: skip
DATATYPES = {dtype: datatype for datatype, dtype in DTYPES.items()}
OUTPUTS = {
    "label": "INT64", "class": "BYTES", "confidence": "FP32", "exit": "INT32", "abstain": "BOOL", "flops": "INT64",
    "probabilities": "FP32",
}  # fmt: skip
ON_REQUEST = frozenset({"probabilities"})  # only in the answer if the request's outputs name them


class InputTensor(msgspec.Struct, kw_only=True):
    """An input by name. data: numbers in row-major order, flat or nested as in shape.

    If the bundle has preprocessing, one tensor of the datatype BYTES named "text" or "image" may stand for all inputs:
    strings, or PNG and JPEG files in base64, shape [rows].
    """

    name: str
    shape: list[int]
    datatype: str
    data: list[Any] | None = None
    parameters: dict[str, Any] | None = None


class WantedOutput(msgspec.Struct, kw_only=True):
    name: str
    parameters: dict[str, Any] | None = None


class InferRequest(msgspec.Struct, kw_only=True):
    """Tensors to classify, rows along each one's batch axis.

    outputs: those to answer with; by default all but probabilities. parameters: operating_point; max_exit,
    the last exit a row may leave from; timeout in microseconds, as Triton's clients send it; priority, 1 to 9,
    1 goes first, 0 is the default. Others are ignored. What isn't required may also be null.
    """

    inputs: list[InputTensor]
    id: str | None = None
    parameters: dict[str, Any] | None = None
    outputs: list[WantedOutput] | None = None


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


def routes(plane: DataPlane) -> APIRouter:
    manifest, points = plane.manifest, plane.points
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
            {"name": name, "datatype": datatype, "shape": [-1, len(manifest.classes)] if name in ON_REQUEST else [-1]}
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

    def groups_of(tensors: list[InputTensor], patience: Patience) -> tuple[Group, ...]:
        if [tensor.datatype for tensor in tensors] == ["BYTES"]:
            values = raw_rows(tensors[0], plane.raw.kind)
            plane.check_rows(len(values))
            return plane.raw.groups(values, f"inputs[0] ({tensors[0].name!r}).data", patience)
        return (group_of_arrays(arrays(tensors), manifest),)

    def decode(received: Body) -> tuple[Query, Encode]:
        asked = decode_json(received, InferRequest, plane.settings.max_decoded_bytes)
        parameters, outputs = asked.parameters or {}, wanted_outputs(asked.outputs or [])
        groups = groups_of(asked.inputs, received.patience)
        rows = sum(len(group.positions) for group in groups)
        plane.check_rows(rows)
        name, max_exit = points.choose(
            parameter(parameters, "operating_point", str), parameter(parameters, "max_exit", int)
        )
        microseconds = check_timeout(parameter(parameters, "timeout", int), "parameters.timeout")
        query = Query(
            groups=groups,
            rows=rows,
            operating_point=name,
            max_exit=max_exit,
            probabilities="probabilities" in outputs,
            timeout=None if microseconds is None else microseconds / 1e6,
            priority=priority(parameters),
        )
        name_of_request = asked.id  # and not `asked`: all its numbers would stay until the answer
        return query, lambda answer: encode(name_of_request, outputs, query, answer)

    def encode(id: str | None, outputs: list[str], query: Query, answer: Answer) -> bytes:
        return msgspec.json.encode(
            InferResponse(
                model_name=manifest.name,
                model_version=manifest.version,
                id=id,
                parameters={"operating_point": query.operating_point},
                outputs=[output(name, answer, manifest.classes) for name in outputs],
            )
        )

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
            raise Unavailable("the server is shutting down.")

    @of_model.get("/ready", summary="Whether the model takes requests")
    @of_model.get("/versions/{version}/ready", include_in_schema=False)
    async def model_ready() -> Response:
        check_ready()
        return _json({"name": manifest.name, "ready": True})

    @of_model.get("", summary="Model metadata: inputs, outputs, versions")
    @of_model.get("/versions/{version}", include_in_schema=False)
    async def model_metadata() -> Response:
        return _json(described)

    @of_model.post("/infer", **documented(InferRequest, InferResponse, example))
    @of_model.post("/versions/{version}/infer", include_in_schema=False)
    async def infer(request: Request) -> Response:
        """Classify the rows of tensors."""
        return await plane.answer(request, _refuse_binary if _is_binary(request) else decode)

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


def _refuse_binary(_: Body) -> tuple[Query, Encode]:
    raise NotSupported(
        "the binary tensor extension isn't supported: send the tensors' data as JSON "
        "(in tritonclient: set_data_from_numpy(…, binary_data=False))."
    )


def parameter(parameters: dict[str, Any], name: str, kind: type[Any]) -> Any:
    """A request parameter, None if it isn't there. Raises InputError if it is of another type."""
    value = parameters.get(name)
    if value is not None and type(value) is not kind:
        words = {str: "a string", int: "a whole number"}
        raise InputError(f"parameters.{name} is {value!r}, expected {words[kind]}.")
    return value


def priority(parameters: dict[str, Any]) -> int:
    level: int = parameter(parameters, "priority", int) or DEFAULT_PRIORITY
    if level not in PRIORITIES:
        raise InputError(f"parameters.priority is {level}, expected {PRIORITIES[0]} to {PRIORITIES[-1]}, or 0.")
    return level


def wanted_outputs(asked: list[WantedOutput]) -> list[str]:
    """The outputs to answer with, in the request's order."""
    names = [output.name for output in asked] or [name for name in OUTPUTS if name not in ON_REQUEST]
    for k, name in enumerate(names):
        if name not in OUTPUTS:
            raise InputError(f"outputs[{k}].name is {name!r}, expected any of {list(OUTPUTS)}.")
        if name in names[:k]:
            raise InputError(f"outputs[{k}].name {name!r} was there before.")
    return names


def arrays(tensors: list[InputTensor]) -> dict[str, NDArray[Any]]:
    """Input tensors as arrays of the datatypes they say."""
    made: dict[str, NDArray[Any]] = {}
    for k, tensor in enumerate(tensors):
        where = f"inputs[{k}] ({tensor.name!r})"
        if tensor.name in made:
            raise InputError(f"{where}: this name was there before.")
        if tensor.datatype not in DTYPES:
            raise InputError(f"{where}.datatype is {tensor.datatype!r}, expected one of {list(DTYPES)}.")
        if any(size < 0 for size in tensor.shape):
            raise InputError(f"{where}.shape is {tensor.shape}, expected sizes of at least 0.")
        if tensor.data is None:
            raise InputError(f"{where} has no data.")
        array = numbers(tensor.data, np.dtype(DTYPES[tensor.datatype]), f"{where}.data")
        if array.size != math.prod(tensor.shape) or (array.ndim > 1 and list(array.shape) != tensor.shape):
            raise InputError(f"{where}.data has the shape {list(array.shape)}, its shape says {tensor.shape}.")
        try:
            made[tensor.name] = array.reshape(tensor.shape)
        except (ValueError, OverflowError) as error:  # more axes, or longer empty ones, than numpy can have
            raise InputError(f"{where}.shape is {tensor.shape}, which no array has: {error}.") from error
    return made


def raw_rows(tensor: InputTensor, kind: str | None) -> list[str]:
    """The strings of a BYTES tensor: texts, or files in base64. kind: its name, "text" or "image"."""
    where = f"inputs[0] ({tensor.name!r})"
    if kind is None or tensor.name != kind:
        named = "and this bundle says nothing about raw rows" if kind is None else f"expected the name {kind!r}"
        raise InputError(f"{where}.datatype is 'BYTES', {named}; tensors of numbers have one of {list(DTYPES)}.")
    data = tensor.data or []
    if [size for size in tensor.shape if size != 1] not in ([len(data)], []) or math.prod(tensor.shape) != len(data):
        raise InputError(f"{where}.shape is {tensor.shape}, its data are {len(data)} rows: expected [{len(data)}].")
    for k, value in enumerate(data):
        if not isinstance(value, str):
            raise InputError(f"{where}.data[{k}] is no string.")
    return data


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
