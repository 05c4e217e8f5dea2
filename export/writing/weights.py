"""All weights of a bundle in one file beside its graphs, each stored once however many graphs use it."""

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

WEIGHTS = "weights.bin"
# Small tensors (shapes, scalars, masks) stay inside the graphs, where ONNX Runtime can fold them.
_INLINE_BYTES = 1024
# Where a tensor begins: large ones at a page, so that giving their pages back leaves others alone. Small ones at what
# the widest vector registers take: pages would make a file of a hundred small ones a tenth larger.
_PAGE, _REGISTER = 4096, 64
_LARGE = 1 << 20


class WeightFile:
    """Writes weights.bin and hands out ONNX initialisers that point into it."""

    def __init__(self, folder: Path, weights: Mapping[str, ir.TensorProtocol]) -> None:
        self._weights = weights
        self._places: dict[str, tuple[int, int]] = {}
        self._inline: dict[str, onnx.TensorProto] = {}
        by_content: dict[bytes, tuple[int, int]] = {}
        with (folder / WEIGHTS).open("wb") as stream:
            for name, tensor in weights.items():
                if tensor.dtype == ir.DataType.STRING or tensor.nbytes < _INLINE_BYTES:
                    continue
                data = tensor.tobytes()
                key = hashlib.sha256(data).digest()
                if key not in by_content:
                    stream.write(b"\0" * (-stream.tell() % (_PAGE if len(data) >= _LARGE else _REGISTER)))
                    by_content[key] = (stream.tell(), len(data))
                    stream.write(data)
                self._places[name] = by_content[key]
                if isinstance(tensor, ir.ExternalTensor):
                    with suppress(BufferError):  # somebody else looks at it
                        tensor.release()  # or what was read of the file stays in memory

    def initializer(self, name: str) -> onnx.TensorProto:
        """The weight `name` as an initialiser: inline if small, else a reference into the file."""
        tensor = self._weights[name]
        if name not in self._places:
            if name not in self._inline:
                proto = ir.serde.serialize_tensor(tensor)
                if proto.data_location == onnx.TensorProto.EXTERNAL:
                    proto = ir.serde.serialize_tensor(ir.Tensor(tensor.numpy(), dtype=tensor.dtype, name=name))
                proto.name = name
                self._inline[name] = proto
            return self._inline[name]
        offset, length = self._places[name]
        proto = onnx.TensorProto(name=name, data_type=tensor.dtype.value, data_location=onnx.TensorProto.EXTERNAL)
        proto.dims.extend(int(d) for d in tensor.shape.numpy())
        entries: dict[str, Any] = {"location": WEIGHTS, "offset": offset, "length": length}
        for key, value in entries.items():
            proto.external_data.add(key=key, value=str(value))
        return proto
