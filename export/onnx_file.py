"""An ONNX file as it was given: what it says itself, which the cascade is compared with."""

from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from offramp.export.outputs import KINDS, ModelFails, Outputs
from offramp.export.probe import Inputs, one_line, plain_session
from offramp.export.rewriting.heads import Head
from offramp.export.rows import Reference
from onnx import external_data_helper

_SMALL = 1024
_QUANTISED = ("QuantizeLinear", "DequantizeLinear")


class OnnxFile:
    """A file's tensors, and its answers.

    rows: it takes so many at a time, no others; the last one is repeated to make them up. A quantised file is run with
    ONNX Runtime's optimisations, as it is served: node by node, what is rounded differs. Others are run without.
    """

    def __init__(self, path: Path, *, rows: int | None = None) -> None:
        self._path = path
        self._rows = rows
        self._model = onnx.load(path, load_external_data=False)
        self._quantised = any(node.op_type in _QUANTISED for node in self._model.graph.node)
        self.tensors = {name for node in self._model.graph.node for name in node.output}

    def reference(self, outputs: Outputs, heads: Sequence[Head] | None = None) -> Reference:
        """The exits' logits as the file's own tensors give them, and its other outputs, by kind.

        heads: where the logits are taken from; the outputs themselves by default.
        """
        heads = [Head(name, name) for name in outputs.logits] if heads is None else heads
        wanted = [*(head.tensor for head in heads), *outputs.names[len(heads) :]]
        session = self._session(wanted)

        def ask(inputs: Inputs) -> list[Any]:
            try:
                return list(session.run(wanted, inputs))
            except Exception as error:  # ONNX Runtime's own kinds
                shapes = {name: list(array.shape) for name, array in inputs.items()}
                raise ModelFails(f"the model fails on inputs of the shapes {shapes}: {one_line(error)}") from error

        def run(inputs: Inputs) -> dict[str, list[np.ndarray[Any, Any]]]:
            if self._rows is not None:
                count, rows = len(next(iter(inputs.values()))), self._rows
                picked = [np.minimum(np.arange(k, k + rows), count - 1) for k in range(0, count, rows)]
                parts = [ask({n: a[some] for n, a in inputs.items()}) for some in picked]
                values = [np.concatenate(part)[:count] for part in zip(*parts, strict=True)]
            else:
                values = ask(inputs)
            for k, head in enumerate(heads):
                if head.binary:
                    values[k] = np.pad(values[k].reshape(-1, 1), ((0, 0), (1, 0)))
            named = dict(zip(outputs.names, values, strict=True))
            return {kind: [named[n] for n in getattr(outputs, kind)] for kind in KINDS if getattr(outputs, kind)}

        return run

    def _session(self, wanted: Sequence[str]) -> Any:
        missing = set(wanted) - {value.name for value in self._model.graph.output}
        if not missing:
            return plain_session(self._path, str(self._path), optimised=self._quantised)
        for tensor in self._model.graph.initializer:  # shapes are inferred from small ones before files are opened
            if external_data_helper.uses_external_data(tensor) and prod(tensor.dims) <= _SMALL:
                external_data_helper.load_external_data_for_tensor(tensor, str(self._path.parent))
                tensor.data_location = onnx.TensorProto.DEFAULT
                del tensor.external_data[:]
        self._model.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in sorted(missing))
        return plain_session(
            self._model.SerializeToString(), str(self._path), optimised=self._quantised, weights=self._path.parent
        )
