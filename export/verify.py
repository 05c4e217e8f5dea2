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
from offramp.runtime.bundle import Bundle
from offramp.runtime.cascade import Cascade
from offramp.runtime.errors import ExportError, InputError
from offramp.runtime.execution.call import Call, not_again
from offramp.runtime.execution.cpu.memory import release_freed
from offramp.runtime.execution.executor import open_executor
from offramp.runtime.inputs import sizes_of
from offramp.runtime.points import OperatingPoint
from offramp.runtime.predictions import Records, Seen

# Differences are judged against the spread of the reference's values: float32 through deep networks, in
# another order of summation, stays far below this; a wrong row, mask or weight is far above.
_TOLERANCE = 1e-3
_SEED = 20260727


@dataclass(frozen=True)
class Verification:
    """What was found: pad values of tensors whose rows may differ in length, and figures for the manifest."""

    pads: dict[str, float]
    summary: dict[str, Any]


def verify(folder: Path, probe: Probe, reference: Reference, company: Company) -> Verification:
    """Check the bundle in `folder` against the model. Raises ExportError naming what differs, and by how much.

    reference: the original model's outputs by kind. Where rows depend on their batch, the cascade runs them
    one by one, and so does what it's compared with.
    """
    rng = np.random.default_rng(_SEED)
    with Cascade.load(folder, threads=1) as cascade:
        check = _Checks(cascade, probe, reference, company, rng)
        sizes = [sizes for sizes, _ in probe.runs if _takes(reference, probe.inputs(sizes))]
        with _named_as_the_cascades():
            worst = max(check.every_exit(s) for s in sizes)
            for s in sizes:
                check.compaction(s)
            states = [check.in_series(s) for s in (sizes[0], sizes[-1])]
        pads = pad_values(cascade, probe, rng) if cascade.manifest.rows_independent else {}
    release_freed()
    with _named_as_the_cascades():
        check_segments(cascade.bundle, states, check.tolerance)
    return Verification(
        pads,
        {
            "sizes": sizes,
            "max_difference": worst,
            "padding": sorted(pads),
        },
    )


def _takes(reference: Reference, inputs: Inputs) -> bool:
    """Whether the model runs on inputs of this size: it may ask for a multiple of 16, which its graph doesn't."""
    try:
        reference(inputs)
    except ModelFails:
        return False
    return True


@contextmanager
def _named_as_the_cascades() -> Iterator[None]:
    try:
        yield
    except InputError as error:
        raise ExportError(f"the cascade fails where the model doesn't: {error} The bundle wasn't written.") from error


def check_segments(bundle: Bundle, states: Sequence[Mapping[str, Any]], tolerance: float = _TOLERANCE) -> None:
    """Every merged graph gives what its blocks give in series. states: all that these gave, at several sizes.

    One graph is open at a time: all J (J - 1) / 2 of them held 30 times the weights of a network of 12 exits.
    """
    for segment in bundle.manifest.segments:
        alone = open_executor(bundle, "cpu", threads=1)
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


def verify_cascade_graph(folder: Path, probe: Probe, reference: Reference, company: Company) -> None:
    """Check the cascade graph. Raises ExportError where its answers aren't the model's."""
    with Cascade.load(folder, threads=1) as cascade:
        check = _Checks(cascade, probe, reference, company, np.random.default_rng(_SEED))
        try:
            for sizes, _ in probe.runs:
                check.compaction(sizes)
        except InputError as error:
            raise ExportError(f"it fails where the blocks don't: {error}") from error


class _Checks:
    def __init__(
        self, cascade: Cascade, probe: Probe, whole: Reference, company: Company, rng: np.random.Generator
    ) -> None:
        self._cascade = cascade
        self._probe = probe
        self._whole = whole
        self._company = company
        self._rng = rng
        self._axes = batch_axes(probe.graph)
        self.tolerance = max(_TOLERANCE, rounding(probe.graph))

    def _reference(self, inputs: Inputs) -> dict[str, list[np.ndarray[Any, Any]]]:
        """The model's outputs; row by row where rows depend on their batch."""
        if self._cascade.manifest.rows_independent:
            return self._whole(inputs)
        count = next(a.shape[self._axes[n]] for n, a in inputs.items())
        single = [self._whole(take(inputs, [i], self._axes)) for i in range(count)]
        return {
            kind: [np.concatenate([s[kind][k] for s in single]) for k in range(len(single[0][kind]))]
            for kind in single[0]
        }

    def every_exit(self, sizes: Mapping[str, int]) -> float:
        """Every exit and auxiliary output equals the model's; returns the largest difference of logits seen."""
        inputs = self._probe.inputs(sizes)
        records, expected = self._cascade.record(inputs), self._reference(inputs)
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
                        f"{dict(sizes)}: the bundle wasn't written."
                    )
        pairs = zip(records.logits, expected["logits"], strict=True)
        finite = [np.abs(a[both] - b[both]) for a, b in pairs if (both := np.isfinite(a) & np.isfinite(b)).any()]
        return max((float(apart.max()) for apart in finite), default=0.0)

    def compaction(self, sizes: Mapping[str, int]) -> None:
        """Rows that leave at random exits, beside others that stay, get the model's logits at their exit."""
        sizes = {**sizes, "batch": 9}
        inputs = self._company.different(sizes)  # copies of one row would all leave together
        records = self._cascade.record(inputs)
        exits = len(records.logits)
        for turn in range(4):
            thresholds = [float(self._rng.choice(records.score[j])) for j in range(exits - 1)]
            for j in range(turn % 2, exits - 1, 2) if turn > 1 else ():
                thresholds[j] = float("inf")
            point = OperatingPoint((*thresholds, float("-inf")))
            cascade = self._cascade.at(point)
            answer = cascade.predict(inputs, fetch=("probabilities",))
            expected = _softmax(np.stack(list(records.logits))[answer.exit, np.arange(len(answer))])
            wrong = np.abs(answer.probabilities - expected).max(axis=1)
            if not wrong.max() <= self.tolerance:
                row = int(wrong.argmax())
                raise ExportError(
                    f"after compaction a row that leaves at exit {answer.exit[row]} has probabilities off by "
                    f"{wrong[row]:.2g} at {sizes}: the bundle wasn't written."
                )
            self._every_exit(cascade, inputs, sizes, records)

    def _every_exit(self, cascade: Cascade, inputs: Inputs, sizes: Mapping[str, int], records: Records) -> None:
        """Where the cascade graph says what every exit said: that is what the blocks say, of the rows that came."""
        seen = Seen(len(records.logits), len(records))
        call = Call(cascade.route, inputs, sizes, limit=cascade.batch_rows, seen=seen)
        if not cascade.executor.fills(call):
            return
        answer = cascade.executor.answer(call, not_again)
        for j in cascade.operating_point.exits:
            came = answer.exit >= j
            said, logits = np.where(came, records.score[j], np.nan), seen.logits[j]
            apart = difference(seen.score[j], said)
            if came.any():
                apart = max(apart, np.inf if logits is None else difference(logits[came], records.logits[j][came]))
            if not apart <= _TOLERANCE:
                raise ExportError(f"it says of exit {j} what is off by {apart:.2g} of its spread at {dict(sizes)}.")

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
