"""From a body to what it asks for: fields, and rows as arrays. Nothing here knows of HTTP or of the model's sessions.

The server reads small bodies itself, and large ones in a process of their own.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from offramp.runtime.bundle import Manifest
from offramp.runtime.errors import InputError
from offramp.server.errors import NotSupported, TooLarge
from offramp.server.protocols.json_body import Body, decode
from offramp.server.protocols.packing import unpacked
from offramp.server.protocols.raw import RawValues
from offramp.server.protocols.tensors import group_of_arrays, groups_of_instances, numbers
from offramp.server.query import DEFAULT_PRIORITY, PRIORITIES, Group

_LONGEST = 1e15  # thirty million years, or thirty in microseconds
DTYPES = {
    "BOOL": "bool", "INT8": "int8", "INT16": "int16", "INT32": "int32", "INT64": "int64",
    "UINT8": "uint8", "UINT16": "uint16", "UINT32": "uint32", "UINT64": "uint64",
    "FP16": "float16", "FP32": "float32", "FP64": "float64",
}  # fmt: skip
DATATYPES = {dtype: datatype for datatype, dtype in DTYPES.items()}
OUTPUTS = {
    "label": "INT64", "class": "BYTES", "confidence": "FP32", "exit": "INT32", "abstain": "BOOL", "flops": "INT64",
    "involuntary": "BOOL", "probabilities": "FP32",
}  # fmt: skip
ON_REQUEST = frozenset({"involuntary", "probabilities"})  # only in the answer if the request's outputs name them


class PredictRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Rows to classify, and how.

    instances: one a row; an object with the model's inputs by name, or the bare value of a single input. If the bundle
    has preprocessing, a row may also be a text ("…" or {"text": "…"}), or a PNG or JPEG file in base64 ("…" or
    {"b64": "…"}). Rows may differ in length. max_exit: the last exit a row may leave from. timeout: seconds, then 503.
    deadline_ms: milliseconds after which each row is answered from the last exit it has reached. priority: 1 to 9, 1
    goes first. probabilities: answer with every class's probability. What isn't required may also be null.
    """

    instances: list[Any]
    operating_point: str | None = None
    max_exit: int | None = None
    timeout: float | None = None
    deadline_ms: float | None = None
    priority: int | None = None
    probabilities: bool | None = None


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
    1 goes first, 0 is the default; deadline_ms, milliseconds after which each row is answered from the last exit it has
    reached. Others are ignored. What isn't required may also be null.
    """

    inputs: list[InputTensor]
    id: str | None = None
    parameters: dict[str, Any] | None = None
    outputs: list[WantedOutput] | None = None


class Fields(msgspec.Struct, kw_only=True):
    """What a request says beside its rows. outputs, id: of the Open Inference Protocol."""

    operating_point: str | None = None
    max_exit: int | None = None
    timeout: float | None = None
    deadline: float | None = None
    probabilities: bool = False
    priority: int = DEFAULT_PRIORITY
    outputs: list[str] = []
    id: str | None = None


class Raw(msgspec.Struct):
    """Texts, or pictures in base64, that the bundle's preprocessing is for. where: the field they came in."""

    values: list[str]
    where: str


class Asked(msgspec.Struct):
    """A request: its rows as groups, or as raw values."""

    fields: Fields
    rows: int
    groups: tuple[Group, ...] = ()
    raw: Raw | None = None


class Limits(msgspec.Struct, frozen=True):
    """body_bytes: of a body, unpacked. decoded_bytes: that its values may take once decoded. rows: in one request."""

    body_bytes: int
    decoded_bytes: int
    rows: int

    def check_rows(self, rows: int) -> None:
        """Raises TooLarge for more rows than one request may have."""
        if rows > self.rows:
            raise TooLarge(f"the request has {rows} rows, this server takes {self.rows} at a time. Send it in parts.")


Read = Callable[[Body, Manifest, Limits], Asked]


def read_predict(body: Body, manifest: Manifest, limits: Limits) -> Asked:
    """The body of /v1/predict. Raises InputError naming what is wrong, TooLarge."""
    asked = decode(unpacked(body, limits.body_bytes), PredictRequest, limits.decoded_bytes)
    instances, raw = asked.instances, RawValues(manifest)
    limits.check_rows(len(instances))
    fields = Fields(
        operating_point=asked.operating_point,
        max_exit=asked.max_exit,
        timeout=check_timeout(asked.timeout),
        deadline=_seconds(asked.deadline_ms, "deadline_ms"),
        priority=check_priority(asked.priority, "priority"),
        probabilities=bool(asked.probabilities),
    )
    if raw.meant(instances):
        return Asked(fields, len(instances), raw=Raw(raw.of_instances(instances), "instances"))
    return Asked(fields, len(instances), groups_of_instances(instances, manifest))


def read_infer(body: Body, manifest: Manifest, limits: Limits) -> Asked:
    """The body of an Open Inference request. Raises InputError naming what is wrong, TooLarge."""
    asked = decode(unpacked(body, limits.body_bytes), InferRequest, limits.decoded_bytes)
    parameters, outputs = asked.parameters or {}, wanted_outputs(asked.outputs or [])
    microseconds = check_timeout(parameter(parameters, "timeout", int), "parameters.timeout")
    fields = Fields(
        operating_point=parameter(parameters, "operating_point", str),
        max_exit=parameter(parameters, "max_exit", int),
        timeout=None if microseconds is None else microseconds / 1e6,
        deadline=_seconds(parameter(parameters, "deadline_ms", float), "parameters.deadline_ms"),
        probabilities="probabilities" in outputs,
        priority=check_priority(parameter(parameters, "priority", int), "parameters.priority"),
        outputs=outputs,
        id=asked.id,
    )
    if [tensor.datatype for tensor in asked.inputs] == ["BYTES"]:
        values = raw_rows(asked.inputs[0], RawValues(manifest).kind)
        limits.check_rows(len(values))
        return Asked(fields, len(values), raw=Raw(values, f"inputs[0] ({asked.inputs[0].name!r}).data"))
    group = group_of_arrays(arrays(asked.inputs), manifest)
    limits.check_rows(len(group.positions))
    return Asked(fields, len(group.positions), (group,))


def refuse_binary(body: Body, manifest: Manifest, limits: Limits) -> Asked:
    """Raises NotSupported."""
    raise NotSupported(
        "the binary tensor extension isn't supported: send the tensors' data as JSON "
        "(in tritonclient: set_data_from_numpy(…, binary_data=False))."
    )


READERS: Mapping[str, Read] = {"predict": read_predict, "infer": read_infer, "binary": refuse_binary}


def check_timeout(seconds: float | None, field: str = "timeout") -> float | None:
    """A timeout as a request says it, None if it doesn't. Longer ones than a clock can count are the longest."""
    if seconds is None:
        return None
    if not seconds > 0:
        raise InputError(f"{field} is {max(seconds, -_LONGEST):g}, expected more than 0.")
    return min(seconds, _LONGEST)


def parameter(parameters: dict[str, Any], name: str, kind: type[Any]) -> Any:
    """A request parameter, None if it isn't there. Raises InputError if it is of another type."""
    value = parameters.get(name)
    fits = (int, float) if kind is float else (kind,)
    if value is not None and type(value) not in fits:
        words = {str: "a string", int: "a whole number", float: "a number"}
        raise InputError(f"parameters.{name} is {value!r}, expected {words[kind]}.")
    return value


def check_priority(level: int | None, field: str) -> int:
    """A priority as a request says it; none and 0 are the default."""
    if not level:
        return DEFAULT_PRIORITY
    if level not in PRIORITIES:
        raise InputError(f"{field} is {level}, expected {PRIORITIES[0]} to {PRIORITIES[-1]}, or 0.")
    return level


def _seconds(milliseconds: float | None, field: str) -> float | None:
    checked = check_timeout(milliseconds, field)
    return None if checked is None else checked / 1e3


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
