"""A bundle proves itself before it's kept: the cascade against the model, compaction, padding."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from offramp.export.outputs import ModelFails
from offramp.export.padding import pad_values
from offramp.export.probe import Inputs, Probe
from offramp.export.rows import Company, Reference, batch_axes, difference, rounding, take
from offramp.runtime.bundle import Bundle, read_bundle
from offramp.runtime.calibration_file import read_calibration
from offramp.runtime.cascade import Cascade
from offramp.runtime.errors import ExportError, InputError
from offramp.runtime.execution.call import Call, not_again
from offramp.runtime.execution.cpu.executor import CpuExecutor
from offramp.runtime.execution.cpu.memory import release_freed
from offramp.runtime.execution.cpu.session import CPU
from offramp.runtime.inputs import sizes_of
from offramp.runtime.points import FULL, OperatingPoint
from offramp.runtime.predictions import Records, Seen

# Differences are judged against the spread of the reference's values: float32 through deep networks, in
# another order of summation, stays far below this; a wrong row, mask or weight is far above.
TOLERANCE = 1e-3
_SEED = 20260727
# Turns in which rows leave: with all exits open, and with every other one closed.
_EXITS_OPEN, _EXITS_CLOSED = (0, 1), (2, 3)


@dataclass(frozen=True)
class Leaving:
    """Different rows of some sizes, what every exit says of each, and points at which they leave at random exits."""

    sizes: Mapping[str, int]
    records: Records
    points: list[OperatingPoint]


@dataclass(frozen=True)
class Verification:
    """What was found: pad values of tensors whose rows may differ in length, and figures for the manifest.

    leaving: what the cascade graph is to be compared with.
    """

    pads: dict[str, float]
    summary: dict[str, Any]
    leaving: list[Leaving]


def verify(folder: Path, probe: Probe, reference: Reference, company: Company) -> Verification:
    """Check the bundle in `folder` against the model. Raises ExportError naming what differs, and by how much.

    reference: the original model's outputs by kind. Where rows depend on their batch, the cascade runs them
    one by one, and so does what it's compared with.
    """
    rng = np.random.default_rng(_SEED)
    with _named_as_the_cascades():
        with _opened(folder, packed=True) as cascade:
            check = _Checks(cascade, probe, company)
            differences = check.every_exit(reference)
            sizes = [sizes for sizes, _ in differences]
            leaving = [check.leaving(s, rng) for s in sizes]
            check.compaction(leaving, _EXITS_OPEN)
            states = [check.in_series(s) for s in (sizes[0], sizes[-1])]
            pads = pad_values(cascade, probe, rng) if cascade.manifest.rows_independent else {}
        for pattern in _EXITS_CLOSED:  # graphs of two blocks have the weights once more: never beside the others
            with _opened(folder) as cascade:
                _Checks(cascade, probe, company).compaction(leaving, [pattern])
        check_segments(cascade.bundle, states, check.tolerance)
    return Verification(
        pads,
        {
            "sizes": sizes,
            "max_difference": max(apart for _, apart in differences),
            "padding": sorted(pads),
        },
        leaving,
    )


@contextmanager
def _opened(folder: Path, *, packed: bool = False) -> Iterator[Cascade]:
    """A cascade whose graphs are opened when they are needed, and gone with it.

    packed: as it is served. It holds the weights twice, so only blocks, each of which has its own.
    """
    bundle = read_bundle(folder, hold=True)
    calibration = read_calibration(folder, bundle.manifest)
    try:
        with Cascade(bundle, calibration, calibration.point(FULL), _executor(bundle, packed=packed)) as cascade:
            yield cascade
    finally:
        release_freed()


def _executor(bundle: Bundle, *, packed: bool) -> CpuExecutor:
    return CpuExecutor(bundle, threads=1, providers=CPU, packed=packed)


@contextmanager
def _named_as_the_cascades() -> Iterator[None]:
    try:
        yield
    except InputError as error:
        raise ExportError(f"the cascade fails where the model doesn't: {error} The bundle wasn't written.") from error


def check_segments(bundle: Bundle, states: Sequence[Mapping[str, Any]], tolerance: float = TOLERANCE) -> None:
    """Every merged graph gives what its blocks give in series. states: all that these gave, at several sizes.

    One graph is open at a time: all J (J - 1) / 2 of them held 30 times the weights of a network of 12 exits.
    """
    for segment in bundle.manifest.segments:
        alone = _executor(bundle, packed=False)
        for made in states:
            for name, value in alone.run(segment, made, segment.outputs).items():
                if value.dtype.kind != "f":  # labels may differ where two classes tie to the last bit
                    continue
                apart = difference(value, made[name])
                if not apart <= tolerance:
                    raise ExportError(
                        f"{segment.file}: {name!r} differs by {apart:.2g} of its spread from what its blocks give "
                        f"at the sizes {sizes_of(made, bundle.manifest)}: the bundle wasn't written."
                    )
        alone.close()
        release_freed()


def verify_cascade_graph(
    folder: Path, probe: Probe, company: Company, leaving: Sequence[Leaving], *, every_exit: bool
) -> None:
    """Check the cascade graph, or the one that gives every exit's word. Raises ExportError where it is wrong."""
    try:
        with _opened(folder) as cascade:
            check = _Checks(cascade, probe, company)
            turns = (*_EXITS_OPEN, *_EXITS_CLOSED)
            check.words(leaving, turns) if every_exit else check.compaction(leaving, turns)
    except InputError as error:
        raise ExportError(f"it fails where the blocks don't: {error}") from error


class _Checks:
    def __init__(self, cascade: Cascade, probe: Probe, company: Company) -> None:
        self._cascade = cascade
        self._probe = probe
        self._company = company
        self._axes = batch_axes(probe.graph)
        self.tolerance = max(TOLERANCE, rounding(probe.graph))

    def _ask(self, whole: Reference, inputs: Inputs) -> dict[str, list[np.ndarray[Any, Any]]]:
        """What `whole` gives for the inputs; row by row where rows depend on their batch."""
        if self._cascade.manifest.rows_independent:
            return whole(inputs)
        count = next(a.shape[self._axes[n]] for n, a in inputs.items())
        single = [whole(take(inputs, [i], self._axes)) for i in range(count)]
        return {
            kind: [np.concatenate([s[kind][k] for s in single]) for k in range(len(single[0][kind]))]
            for kind in single[0]
        }

    def every_exit(self, reference: Reference) -> list[tuple[Mapping[str, int], float]]:
        """Every exit and auxiliary output equals the model's; the largest difference of logits at each size.

        Left out are sizes that the model refuses: it may ask for a multiple of 16, which its graph doesn't.
        """
        found: list[tuple[Mapping[str, int], float]] = []
        failure: ModelFails | None = None
        for sizes, _ in self._probe.runs:
            inputs = self._probe.inputs(sizes)
            try:
                expected = self._ask(reference, inputs)
            except ModelFails as error:
                failure = error
                continue
            found.append((sizes, self._differences(sizes, inputs, expected)))
        if not found and failure is not None:
            raise failure
        return found

    def _differences(self, sizes: Mapping[str, int], inputs: Inputs, expected: dict[str, list[Any]]) -> float:
        records = self._cascade.record(inputs)
        got: dict[str, Any] = {
            "logits": records.logits,
            "features": records.features,
            "routing": records.routing,
            "external": records.external,
            "reservation": records.reservation,
        }
        for kind, tensors in expected.items():
            for k, tensor in enumerate(tensors):
                apart = difference(np.asarray(got[kind][k]), tensor)
                if not apart <= self.tolerance:
                    raise ExportError(
                        f"{kind}[{k}] of the cascade differs from the model's by {apart:.2g} of its spread at "
                        f"{dict(sizes)}: the bundle wasn't written. {self._to_blame(inputs, expected, kind, k)}"
                    )
        pairs = zip(records.logits, expected["logits"], strict=True)
        finite = [np.abs(a[both] - b[both]) for a, b in pairs if (both := np.isfinite(a) & np.isfinite(b)).any()]
        return max((float(apart.max()) for apart in finite), default=0.0)

    def _to_blame(self, inputs: Inputs, expected: Mapping[str, list[Any]], kind: str, k: int) -> str:
        """Whether the graph differs from the model already before it is cut, in a sentence."""
        apart = difference(self._ask(self._probe.answers, inputs)[kind][k], expected[kind][k])
        if apart <= self.tolerance:
            return "The graph before it was cut doesn't: this is offramp's fault, please report it."
        return f"So does the graph before it was cut, by {apart:.2g}: it isn't what the model computes."

    def leaving(self, sizes: Mapping[str, int], rng: np.random.Generator) -> Leaving:
        """Rows of these sizes, and a point for each turn: all exits open, or every other one."""
        sizes = {**sizes, "batch": 9}
        records = self._cascade.record(self._company.different(sizes))  # copies of one row would all leave together
        exits, points = len(records.logits), []
        for turn in range(len(_EXITS_OPEN) + len(_EXITS_CLOSED)):
            thresholds = [float(rng.choice(records.score[j])) for j in range(exits - 1)]
            for j in range(turn % 2, exits - 1, 2) if turn in _EXITS_CLOSED else ():
                thresholds[j] = float("inf")
            points.append(OperatingPoint((*thresholds, float("-inf"))))
        return Leaving(sizes, records, points)

    def compaction(self, leaving: Sequence[Leaving], turns: Sequence[int]) -> None:
        """Rows that leave at random exits, beside others that stay, get the model's logits at their exit."""
        for rows in leaving:
            inputs, records = self._company.different(rows.sizes), rows.records
            for turn in turns:
                answer = self._cascade.at(rows.points[turn]).predict(inputs, fetch=("probabilities",))
                expected = _softmax(np.stack(list(records.logits))[answer.exit, np.arange(len(answer))])
                wrong = np.abs(answer.probabilities - expected).max(axis=1)
                if not wrong.max() <= self.tolerance:
                    row = int(wrong.argmax())
                    raise ExportError(
                        f"after compaction a row that leaves at exit {answer.exit[row]} has probabilities off by "
                        f"{wrong[row]:.2g} at {dict(rows.sizes)}: the bundle wasn't written."
                    )

    def words(self, leaving: Sequence[Leaving], turns: Sequence[int]) -> None:
        """Where the cascade graph says what every exit said: that is what the blocks say, of the rows that came."""
        for rows in leaving:
            inputs, records = self._company.different(rows.sizes), rows.records
            for turn in turns:
                cascade, seen = self._cascade.at(rows.points[turn]), Seen(len(records.logits), len(records))
                call = Call(cascade.route, inputs, rows.sizes, limit=cascade.batch_rows, seen=seen)
                if not cascade.executor.fills(call):
                    continue
                answer = cascade.executor.answer(call, not_again)
                for j in cascade.operating_point.exits:
                    came = answer.exit >= j
                    said, logits = np.where(came, records.score[j], np.nan), seen.logits[j]
                    apart = difference(seen.score[j], said)
                    if came.any():
                        there = np.inf if logits is None else difference(logits[came], records.logits[j][came])
                        apart = max(apart, there)
                    if not apart <= self.tolerance:
                        raise ExportError(
                            f"it says of exit {j} what is off by {apart:.2g} of its spread at {dict(rows.sizes)}."
                        )

    def in_series(self, sizes: Mapping[str, int]) -> dict[str, Any]:
        """The inputs and all that the blocks make of them, one after the other."""
        manifest = self._cascade.manifest
        made: dict[str, Any] = self._probe.inputs(
            {**sizes, "batch": sizes["batch"] if manifest.rows_independent else 1}
        )
        for block in manifest.blocks:
            made |= self._cascade.run_graph(block, made, block.outputs)
        return made


def _softmax(logits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    raised = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    return np.asarray(raised / raised.sum(axis=1, keepdims=True))
