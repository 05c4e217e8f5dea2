"""Rows made different from each other, and whether a row's answer depends on which others stand beside it.

An example may be a single row, and its copies show nothing: where rows are averaged, say, a row among its own copies
gets the answer that it gets alone.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
from offramp.export.graph import ModelGraph, Op
from offramp.export.outputs import ModelFails
from offramp.export.probe import Inputs, Probe
from offramp.runtime.errors import ExportError

Reference = Callable[[Inputs], dict[str, list[np.ndarray[Any, Any]]]]
Values = np.ndarray[Any, Any]

# Rows change more than that when an activation is quantised over the batch, or normalised over it.
_MIXING_TOLERANCE = 1e-4
# Numbers of fewer bits are rounded that much more coarsely, and a batch of another size is added up in another order.
_HALF_TOLERANCE = {ir.DataType.FLOAT16: 2e-2, ir.DataType.BFLOAT16: 1e-1}
_SEED = 20260727
_MINE = 6
# What only shows beside larger rows (a maximum over the batch, a scale taken from it) shows beside these.
_OTHERS, _LOUD = 11, 8.0
# Operations that hand on the values they are given, to look up in a table or to pass on.
_SAME_VALUES = {"Cast", "Expand", "Flatten", "Gather", "Identity", "Reshape", "Slice", "Squeeze", "Transpose"}
_SAME_VALUES |= {"Concat", "Split", "Tile", "Unsqueeze"}
_SAME_TABLE = {"Cast", "DequantizeLinear", "Identity"}


@dataclass(frozen=True)
class Company:
    """What was found. different: valid rows at given axis sizes, no two alike if the model takes others at all."""

    independent: bool
    difference: float
    different: Callable[[Mapping[str, int]], Inputs]


def keep_company(probe: Probe, reference: Reference) -> Company:
    """Does a row's answer stay the same whoever it shares a batch with?

    Rows are asked alone, then in batches of several sizes and orders, beside ones that are like them and ones that
    are far larger. Raises ExportError if the model answers the same input differently each time.
    """
    sizes, axes = probe.example_sizes, batch_axes(probe.graph)
    _refuse_random(reference, probe.inputs({**sizes, "batch": _MINE}))
    tolerance = max(_MIXING_TOLERANCE, rounding(probe.graph))
    for guess in (True, False):
        make = partial(_made, probe, vocabularies(probe.graph), guess)
        mine = make({**sizes, "batch": _MINE})
        others = make({**sizes, "batch": _OTHERS}, times=_LOUD, seed=_SEED + 1)
        try:
            worst = _worst(reference, mine, others, axes)
        except (ModelFails, _NoAnswer):  # values that this model doesn't take
            continue
        return Company(worst <= tolerance, worst, make)
    example = probe.inputs({**sizes, "batch": _MINE + _OTHERS})
    mine, others = (take(example, rows, axes) for rows in (range(_MINE), range(_MINE, _MINE + _OTHERS)))
    worst = _worst(reference, mine, others, axes, strict=False)
    return Company(worst <= tolerance, worst, probe.inputs)


def rounding(graph: ModelGraph) -> float:
    """What values may differ by, in units of their spread, because some have few bits; 0 where none has."""
    return max((_HALF_TOLERANCE.get(dtype, 0.0) for dtype in graph.dtypes.values()), default=0.0)


class _NoAnswer(Exception):
    """Answers that are no numbers can't be compared."""


def _refuse_random(reference: Reference, inputs: Inputs) -> None:
    pairs = zip(reference(inputs)["logits"], reference(inputs)["logits"], strict=True)
    for j, (a, b) in enumerate(pairs):
        if not np.array_equal(a, b, equal_nan=True):
            raise ExportError(
                f"exit {j} gives other logits for the same input: the model is random. Call model.eval() before "
                "exporting it; what is random even then draws by itself, as F.dropout(x) does unless it is told "
                "training=self.training."
            )


def _worst(
    reference: Reference, mine: Inputs, others: Inputs, axes: Mapping[str, int], *, strict: bool = True
) -> float:
    """The largest change of a row's logits, in units of their size, over all companies that it is put in."""
    alone = [reference(take(mine, [row], axes))["logits"] for row in range(_MINE)]
    if strict and not all(np.isfinite(logits).all() for exits in alone for logits in exits):
        raise _NoAnswer
    together = {n: np.concatenate([mine[n], others[n]], axis=axes[n]) for n in mine}
    everybody = np.random.default_rng(_SEED).permutation(_MINE + _OTHERS).tolist()
    companies = [[0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [3, 1, 5, 0], [2, _MINE], [_MINE + 1, 4], everybody]
    worst = 0.0
    for rows in companies:
        for j, logits in enumerate(reference(take(together, rows, axes))["logits"]):
            for place, row in enumerate(rows):
                if row < _MINE:
                    worst = max(worst, difference(logits[place], alone[row][j][0]))
    return worst


def _made(
    probe: Probe,
    tables: Mapping[str, int],
    guess: bool,
    sizes: Mapping[str, int],
    *,
    times: float = 1.0,
    seed: int = _SEED,
) -> Inputs:
    """Rows of the example's kind and range with other values, valid as far as graph and example tell.

    tables: of `vocabularies`. guess: vary integers, too, of which no bound is known. times: how much larger floats are.
    """
    rng = np.random.default_rng(seed)
    inputs = probe.inputs(sizes)
    axes = batch_axes(probe.graph)
    for name, array in inputs.items():
        by_row = np.moveaxis(array, axes[name], 0)
        made: Any = by_row
        if name in tables:
            other = rng.integers(0, tables[name], by_row.shape)
            made = np.where(rng.random(by_row.shape) < 0.5, other, by_row) if by_row.ndim > 1 else other
        elif len(inputs) > 1 and _is_mask(by_row):
            made = _shortened(by_row)
        elif by_row.dtype.kind == "f":
            made = _floats(by_row, times, rng)
        elif by_row.dtype.kind == "b":
            made = rng.random(by_row.shape) < 0.5
        elif guess:
            # 0 may be a divisor or no length at all, so it is taken only where the example has it.
            low, high = int(by_row.min(initial=1)), int(by_row.max(initial=2))
            made = rng.integers(min(1, low), max(2, high), by_row.shape, endpoint=True)
        inputs[name] = _back(made.astype(array.dtype), axes[name])
    return inputs


def _back(by_row: Values, axis: int) -> Values:
    return np.ascontiguousarray(np.moveaxis(by_row, 0, axis))


def _column(values: Values, by_row: Values) -> Values:
    """One value a row, to be multiplied with all of it."""
    return values.reshape(-1, *[1] * (by_row.ndim - 1))


def _is_mask(by_row: Values) -> bool:
    return by_row.ndim > 1 and bool(np.isin(by_row, (0, 1)).all()) and bool(by_row.any())


def _shortened(by_row: Values) -> Values:
    """Masks of several lengths: more of their end is masked, or of their beginning where that is masked already."""
    made = by_row.copy()
    for row, mask in enumerate(made):
        width = mask.shape[-1]
        seen = mask[..., ::-1] if not mask[..., 0].any() else mask  # a view
        end = width - int((seen[..., ::-1] != 0).argmax(-1).min())
        first = int((seen != 0).argmax(-1).max())  # which stays: a row without any place isn't one
        seen[..., max(first + 1, end - row % (width // 2 + 1)) :] = 0
    return made


def _floats(by_row: Values, times: float, rng: np.random.Generator) -> Values:
    """Rows of several scales, with noise; `times` larger ones may leave the example's range, but not change sign."""
    wide = by_row.astype(np.float64)
    finite = wide[np.isfinite(wide)]
    low, high = finite.min(initial=np.inf), finite.max(initial=-np.inf)
    noise = rng.standard_normal(wide.shape)
    if not low < high:  # a constant says nothing about a range
        return times * (wide + noise)
    made = wide * _column(np.linspace(0.25, 2.0, len(wide)), wide) + 0.5 * float(finite.std()) * noise
    if times == 1:
        return np.clip(made, low, high)
    return times * (np.abs(made) if low >= 0 else made)


def make_inputs(graph: ModelGraph, sizes: Mapping[str, int], seed: int = 0) -> Inputs:
    """Made-up inputs for a model that came without an example: normal floats, ids of the vocabulary, else ones."""
    rng = np.random.default_rng(seed)
    tables = vocabularies(graph)
    out = {}
    for name, (dtype, shape) in graph.inputs.items():
        dims = [sizes[d] if isinstance(d, str) else d for d in shape]
        if name in tables:
            made: Values = rng.integers(0, tables[name], dims)
        else:
            made = rng.standard_normal(dims) if dtype.is_floating_point() else np.ones(dims)
        out[name] = made.astype(dtype.numpy())
    return out


def vocabularies(graph: ModelGraph) -> dict[str, int]:
    """{input: rows of the smallest table that it is looked up in}, for inputs of integers that are."""
    users: dict[str, list[Op]] = {}
    for op in graph.ops:
        for name in op.inputs:
            users.setdefault(name, []).append(op)
    found = {}
    for name, (dtype, _) in graph.inputs.items():
        if dtype.numpy().kind not in "iu":
            continue
        seen, waiting, sizes = set(), [name], []
        while waiting:
            value = waiting.pop()
            if value in seen:
                continue
            seen.add(value)
            for op in users.get(value, []):
                size = _table_size(graph, op, value)
                if size is not None:
                    sizes.append(size)
                elif op.proto.op_type in _SAME_VALUES and _hands_on(op, value):
                    waiting.extend(op.outputs)
        if sizes:
            found[name] = min(sizes)
    return found


def _hands_on(op: Op, value: str) -> bool:
    return value in op.proto.input if op.proto.op_type == "Concat" else op.proto.input[0] == value


def _table_size(graph: ModelGraph, op: Op, value: str) -> int | None:
    """How many rows the table has where `op` looks `value` up in one."""
    kind, given = op.proto.op_type, list(op.proto.input)
    if kind == "Gather" and given[1] == value:
        axis = next((a.i for a in op.proto.attribute if a.name == "axis"), 0)
        return _weight_size(graph, given[0], axis)
    if kind == "EmbedLayerNormalization" and value in given[:2]:
        return _weight_size(graph, given[2 if value == given[0] else 4], 0)
    if kind == "OneHot" and given[0] == value and given[1] in graph.weights:
        return int(graph.weights[given[1]].numpy().reshape(-1)[0])
    return None


def _weight_size(graph: ModelGraph, name: str, axis: int) -> int | None:
    while name not in graph.weights:
        op = graph.producer.get(name)
        if op is None or op.proto.op_type not in _SAME_TABLE:
            return None
        name = op.proto.input[0]
    return int(graph.weights[name].shape.numpy()[axis])


def batch_axes(graph: ModelGraph) -> dict[str, int]:
    return {name: shape.index("batch") for name, (_, shape) in graph.inputs.items()}


def take(inputs: Inputs, rows: Sequence[int], axes: Mapping[str, int]) -> Inputs:
    return {n: np.ascontiguousarray(np.take(a, rows, axis=axes[n])) for n, a in inputs.items()}


def difference(a: Values, b: Values) -> float:
    """The largest difference, in units of the values' spread; NaN must meet NaN."""
    if a.shape != b.shape:
        return float("inf")
    a, b = a.astype(np.float64), b.astype(np.float64)
    if not np.array_equal(np.isnan(a), np.isnan(b)):
        return float("inf")
    finite = np.isfinite(a) & np.isfinite(b)
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return float("inf")
    spread = max(1.0, float(np.abs(b[finite]).max(initial=0.0)))
    return float(np.abs(a[finite] - b[finite]).max(initial=0.0)) / spread
