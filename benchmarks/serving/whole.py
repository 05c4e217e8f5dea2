"""The whole model in one plain ONNX Runtime session, as all peers run it. Needs numpy and ONNX Runtime only."""

import os
from typing import Any

import numpy as np
import onnxruntime


class Whole:
    """Rows in, label and confidence out. MODEL, THREADS and SPIN are read from the environment."""

    def __init__(self) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = int(os.environ.get("THREADS", "1"))
        options.inter_op_num_threads = 1
        options.add_session_config_entry("session.intra_op.allow_spinning", os.environ.get("SPIN", "0"))
        self._session = onnxruntime.InferenceSession(os.environ["MODEL"], options, providers=["CPUExecutionProvider"])
        kinds = {"tensor(int64)": np.int64, "tensor(uint8)": np.uint8, "tensor(float)": np.float32}
        self._dtypes = {given.name: kinds[given.type] for given in self._session.get_inputs()}

    def __call__(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """One batch, padded with zeros to its longest row, which the mask says."""
        feeds = {name: _padded([np.asarray(row[name], dtype) for row in rows]) for name, dtype in self._dtypes.items()}
        logits = self._session.run(None, feeds)[0]
        labels = logits.argmax(axis=1)
        confidence = 1 / np.exp(logits - logits.max(axis=1, keepdims=True)).sum(axis=1)
        return [
            {"label": label, "confidence": sure}
            for label, sure in zip(labels.tolist(), confidence.tolist(), strict=True)
        ]


def _padded(arrays: list[np.ndarray]) -> np.ndarray:
    if len(arrays) == 1:
        return arrays[0][None]
    if len({array.shape for array in arrays}) == 1:
        return np.stack(arrays)
    made = np.zeros((len(arrays), max(map(len, arrays))), arrays[0].dtype)
    for row, array in zip(made, arrays, strict=True):
        row[: len(array)] = array
    return made
