"""The exit gate on whatever device its logits are on: one Triton launch for CUDA tensors, numpy elsewhere."""

import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from offramp.kernels import reference
from offramp.kernels.compact import compact_into
from offramp.kernels.device import COMPACT_ROWS, as_bytes, is_tensor, on_triton, power_of_two
from offramp.kernels.reference import GateOutput, Survivors, rounded_up

if TYPE_CHECKING:
    import torch

# Up to here a row is held on chip whole; beyond, it is streamed. 8,192 float32 are 32 registers of 256 threads.
TILE = 8192
STREAM = 2048  # lanes that stream a row: a running maximum and its sums in each
_MOST_PARTS = 64


def exit_gate(
    logits: Any,
    scale: Any = 1.0,
    bias: Any = 0.0,
    inv_temperature: Any = 1.0,
    threshold: float = -math.inf,
    *,
    live: Any = None,
) -> GateOutput:
    """The fused gate: z' = scale * z + bias, its label y, and everything else of t * z', t = inv_temperature[y].

    logits: (n, C), 1 <= C <= 262,144, any float type, any row stride; an array, or a torch tensor, whose device
    says where it is done: CUDA tensors by one Triton launch that reads the logits once (twice where C > 8,192 and
    the temperature differs by class), without waiting for it; others by `reference.exit_gate`.
    scale, bias, inv_temperature: scalars or (C,), the last > 0.
    live: (n,) bool, rows that aren't never leave.

    Returns arrays, or tensors on the logits' device. On a device z' is float32, and so are the sums over classes.
    """
    if not is_tensor(logits):
        return reference.exit_gate(logits, scale, bias, inv_temperature, threshold, live=live)
    if not on_triton(logits):
        return _elsewhere(logits, scale, bias, inv_temperature, threshold, live)
    import torch

    rows, device = logits.shape[0], logits.device
    out = GateOutput(
        label=torch.empty(rows, dtype=torch.int64, device=device),
        confidence=torch.empty(rows, dtype=torch.float64, device=device),
        score=torch.empty(rows, dtype=torch.float32, device=device),
        entropy=torch.empty(rows, dtype=torch.float64, device=device),
        margin=torch.empty(rows, dtype=torch.float64, device=device),
        leave=torch.empty(rows, dtype=torch.bool, device=device),
    )
    gate_into(out, logits, scale, bias, inv_temperature, threshold, live=live)
    return out


def gate_into(
    out: GateOutput,
    logits: "torch.Tensor",
    scale: Any = 1.0,
    bias: Any = 0.0,
    inv_temperature: Any = 1.0,
    threshold: float = -math.inf,
    *,
    live: "torch.Tensor | None" = None,
    survivors: Survivors | None = None,
) -> None:
    """`exit_gate` into tensors that are there already, and with `survivors` the compaction in the same launch.

    out: label of any integer type, confidence, entropy and margin of any float type or None (not computed;
    entropy and margin need a confidence beside them). survivors: as `compact.compact` gives them.
    Nothing is waited for; it runs on torch's current stream.
    """
    from offramp.kernels import gate_kernels

    if logits.dim() != 2 or logits.shape[1] < 1:
        raise ValueError(f"logits have the shape {tuple(logits.shape)}, expected (rows, classes >= 1).")
    rows, classes = logits.shape
    if rows == 0:
        if survivors is not None:
            survivors.count.zero_()
        return
    uniform, by_class = _temperature(inv_temperature, logits)
    fused = survivors is not None and rows <= COMPACT_ROWS
    tickets, floats, integers = scratch(logits.device)
    arguments = (
        logits,
        logits.stride(0),
        logits.stride(1),
        rows,
        _per_class(scale, 1.0, logits),
        _per_class(bias, 0.0, logits),
        by_class,
        uniform,
        rounded_up(threshold),
        None if live is None else as_bytes(live),
        out.label,
        out.confidence,
        out.score,
        out.entropy,
        out.margin,
        as_bytes(out.leave),
        survivors.index if fused and survivors is not None else None,
        survivors.count if fused and survivors is not None else None,
        tickets,
    )
    shared = {
        "classes": classes,
        "ALIGNED": math.gcd(logits.stride(0), 16) or 16,  # a stride of 0 is one row for all
        "COMPACT": -(-rows // 1024) if fused else 0,
    }
    processors = _processors(logits.device)
    if classes <= TILE:
        block = max(16, power_of_two(classes))
        height = max(1, min(2048 // block, power_of_two(-(-rows // processors)), 64))
        gate_kernels.gate_tile[(-(-rows // height),)](
            *arguments, **shared, ROWS=height, BLOCK=block, num_warps=_warps(height * block)
        )
    else:
        parts = 1 if by_class is not None else _parts(rows, classes, processors)
        steps = -(-classes // (parts * STREAM))
        gate_kernels.gate_stream[(rows, parts)](
            *arguments, floats, integers, **shared, STEPS=steps, PARTS=parts, BLOCK=STREAM, num_warps=8
        )
    if survivors is not None and not fused:
        compact_into(survivors, out.leave, live)


def _warps(values: int) -> int:
    """Warps for a tile: eight to sixteen values a thread, and no reduction across warps where one warp will do."""
    return 1 if values <= 512 else 2 if values <= 1024 else 4 if values <= 2048 else 8


def _parts(rows: int, classes: int, processors: int) -> int:
    """Programs a row, so that few long rows still use the whole device; each has 4,096 classes or more."""
    wanted = power_of_two(-(-2 * processors // rows))
    return max(1, min(wanted, power_of_two(classes // 4096 + 1) // 2, _MOST_PARTS))


@lru_cache(maxsize=64)
def _processors(device: "torch.device") -> int:
    import torch

    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


_scratch: dict[Any, tuple[Any, Any, Any]] = {}


def scratch(device: "torch.device") -> tuple[Any, Any, Any]:
    """Tickets (all 0 between launches) and room for parts of rows, one set a stream: launches on it take turns."""
    import torch

    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    found = _scratch.get((device, stream))
    if found is None:
        # Few rows are split: rows * parts <= 4 * processors * 2, rounded up generously.
        rows = 4096
        found = _scratch[device, stream] = (
            torch.zeros(1 + rows, dtype=torch.int32, device=device),
            torch.empty(rows * 5 * 4, dtype=torch.float32, device=device),
            torch.empty(rows * 2 * 4, dtype=torch.int32, device=device),
        )
    return found


def _per_class(value: Any, neutral: float, logits: "torch.Tensor") -> "torch.Tensor | None":
    """(C,) float32 on the logits' device, or None where it changes nothing."""
    if isinstance(value, int | float) and value == neutral:
        return None
    import torch

    tensor = torch.as_tensor(value, dtype=torch.float32, device=logits.device)
    return tensor.expand(logits.shape[1]).contiguous()


def _temperature(value: Any, logits: "torch.Tensor") -> tuple[float, "torch.Tensor | None"]:
    """One inverse temperature for all classes, or one a class."""
    if isinstance(value, int | float):
        return float(value), None
    if not is_tensor(value):
        array = np.asarray(value, np.float32).reshape(-1)
        if (array == array[0]).all():
            return float(array[0]), None
    return 1.0, _per_class(value, math.nan, logits)


def _elsewhere(logits: "torch.Tensor", scale: Any, bias: Any, inverse: Any, threshold: float, live: Any) -> GateOutput:
    """Tensors that Triton doesn't serve: by torch's own operations on a device, by numpy on the CPU."""
    import torch

    if logits.is_cuda:
        from offramp.kernels import eager

        return eager.exit_gate(logits, scale, bias, inverse, threshold, live=live)

    def plain(value: Any) -> Any:
        return value.detach().to(torch.float64).numpy() if is_tensor(value) else value

    out = reference.exit_gate(
        plain(logits),
        plain(scale),
        plain(bias),
        plain(inverse),
        threshold,
        live=None if live is None else np.asarray(live),
    )
    return GateOutput(*(torch.from_numpy(np.ascontiguousarray(array)) for array in out))
