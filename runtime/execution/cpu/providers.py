"""Which of ONNX Runtime's execution providers work here: those that are built in may lack their libraries or device."""

from typing import Any

import numpy as np
from offramp.runtime.execution.cpu.session import CPU, onnxruntime

# An ONNX model of one node, y = MatMul(x, w), float32 x [1, 2], w the identity: there is no provider without it.
_ONE_NODE = (
    b'\x08\x07\x12\x00:]\n\x11\n\x01x\n\x01w\x12\x01y"\x06MatMul\x12\x01g*\x1b\x08\x02\x08\x02\x10\x01"\x10'
    b"\x00\x00\x80?\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x80?B\x01wZ\x13\n\x01x\x12\x0e\n\x0c\x08\x01\x12\x08\n\x02"
    b"\x08\x01\n\x02\x08\x02b\x13\n\x01y\x12\x0e\n\x0c\x08\x01\x12\x08\n\x02\x08\x01\n\x02\x08\x02B\x04\n\x00\x10\r"
)


def tried_providers() -> dict[str, str]:
    """Every installed provider, best first, with why it doesn't run a graph of one node; empty where it does.

    Raises RuntimeUnavailable.
    """
    ort = onnxruntime()
    return {name: _tried(ort, name) for name in ort.get_available_providers()}


def _tried(ort: Any, name: str) -> str:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    if [name] != CPU:  # else the CPU would run it in the provider's place, and nobody would notice
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    given = np.array([[1, 2]], np.float32)
    try:
        session = ort.InferenceSession(_ONE_NODE, options, providers=[name], enable_fallback=0)
        if name not in session.get_providers():
            return f"ONNX Runtime takes {', '.join(session.get_providers())} in its place"
        (made,) = session.run(["y"], {"x": given})
    except Exception as error:  # each provider has errors of its own
        return " ".join(str(error).split()) or type(error).__name__
    return "" if np.array_equal(made, given) else f"it says that {given.tolist()} times 1 is {made.tolist()}"
