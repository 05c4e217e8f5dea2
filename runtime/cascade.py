"""The cascade: blocks in series, a gate after each, and only the rows that stay go on."""

import math
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import numpy as np
from numpy.typing import NDArray
from offramp.runtime.bundle import (
    CASCADE_INPUTS,
    CASCADE_OUTPUTS,
    GATE_INPUTS,
    Block,
    Bundle,
    CascadeGraph,
    Manifest,
    Segment,
    read_bundle,
)
from offramp.runtime.calibration_file import Calibration, read_calibration
from offramp.runtime.errors import InputError
from offramp.runtime.execution.cpu.blocks import Run
from offramp.runtime.execution.cpu.cascade_graph import answer_cascade_graph
from offramp.runtime.execution.cpu.session import Sessions, available_threads, check_threads, resolve_providers
from offramp.runtime.execution.route import Route
from offramp.runtime.execution.stages import plan
from offramp.runtime.gate import Gate
from offramp.runtime.inputs import Arrays, check_inputs
from offramp.runtime.points import FULL, OperatingPoint
from offramp.runtime.predictions import Predictions, Records
from offramp.runtime.preprocess import Preprocessor, from_bundle
from offramp.runtime.scores import LARGEST

FETCHABLE = ("probabilities", "routing")
_BATCH_ROWS = 128


class Cascade:
    """A bundle ready to answer, at one operating point. Any number of threads may use it at once."""

    def __init__(
        self,
        bundle: Bundle,
        calibration: Calibration,
        point: OperatingPoint,
        sessions: Sessions,
        batch_rows: int,
    ) -> None:
        self.bundle = bundle
        self.calibration = calibration
        self.operating_point = point
        self._sessions = sessions
        self._batch_rows = batch_rows
        self._preprocessor: Preprocessor | None = None
        self._route = Route(self.manifest, Gate(point, len(self.manifest.exits)))
        ones, zeros = np.ones(len(self.classes), np.float32), np.zeros(len(self.classes), np.float32)
        self._gate_inputs = dict(zip(GATE_INPUTS, (ones, zeros, ones), strict=True))
        self._switches = self._one_graph()
        _warn_of_dead_exits(point)

    @classmethod
    def load(
        cls,
        path: str | Path,
        device: str = "cpu",
        operating_point: str | OperatingPoint = FULL,
        threads: int | None = None,
        providers: Sequence[Any] | None = None,
        *,
        batch_rows: int | None = None,
    ) -> Self:
        """Read, verify and open a bundle.

        device: "cpu"; "cuda" or "cuda:N", by ONNX Runtime's CUDA provider where it is, else by torch; "torch:cpu" or
        "torch:cuda", by torch in any case. operating_point: one of the bundle's by name, or your own.
        threads: intra-op threads a session; default what affinity and control group allow.
        providers: ONNX Runtime execution providers, instead of the device's own.
        batch_rows: the most rows a block runs at once, 128 by default, 1,024 on a GPU; larger inputs go through in
        pieces.

        Raises BundleError (nothing has been run then), InputError, RuntimeUnavailable.
        """
        if threads is not None:
            check_threads(threads)
        if batch_rows is not None:
            _check_batch_rows(batch_rows)
        if isinstance(device, str) and device.startswith(("cuda", "torch:")) and find_spec("torch") is not None:
            from offramp.runtime.execution.device.executor import (
                load_on_device,  # imports torch, which most machines lack
            )

            return cast(Self, load_on_device(path, device, operating_point, providers, batch_rows))
        bundle = read_bundle(path)
        calibration = read_calibration(bundle.path, bundle.manifest)
        point = operating_point if isinstance(operating_point, OperatingPoint) else calibration.point(operating_point)
        chosen = resolve_providers(device, providers)
        sessions = Sessions(bundle, threads=threads or available_threads(), providers=chosen)
        cascade = cls(bundle, calibration, point, sessions, batch_rows or _BATCH_ROWS)
        nested = bundle.manifest.cascade
        # What this point needs; other graphs when they are asked for.
        if cascade._switches is not None and nested is not None:
            sessions.get(nested.file)
        else:
            for stage in cascade._route.stages:
                sessions.get(stage.graph.file)
        return cascade

    def _one_graph(self) -> dict[str, NDArray[Any]] | None:
        """Thresholds and switches for the cascade graph; None where blocks run one by one.

        That graph asks exits for nothing but a score that reaches a threshold, on the CPU. A threshold of -inf
        lets NaN leave too, which it can't say; and what runs as one graph anyway needs no gates.
        """
        nested, thresholds = self.manifest.cascade, self.operating_point.thresholds
        if nested is None or len(self._route.stages) == 1 or -math.inf in thresholds[:-1] or not self._sessions.cpu:
            return None
        return switches(nested, thresholds[:-1])

    def run_nested(self, inputs: Mapping[str, Any], settings: Mapping[str, Any] | None = None) -> list[Any]:
        """Run the cascade graph on checked inputs: its CASCADE_OUTPUTS.

        settings: thresholds and open exits, as `switches` makes them; this operating point's by default.
        """
        nested, chosen = self.manifest.cascade, self._switches if settings is None else settings
        assert nested is not None
        assert chosen is not None
        return self._run(nested.file, {**chosen, **inputs}, list(CASCADE_OUTPUTS))

    @property
    def manifest(self) -> Manifest:
        return self.bundle.manifest

    @property
    def classes(self) -> list[str]:
        return self.manifest.classes

    @property
    def batch_rows(self) -> int:
        """The most rows a block runs at once."""
        return self._batch_rows

    @property
    def fingerprint(self) -> str:
        """What decides the last bits of an answer beside the bundle: the library, its providers and threads."""
        return self._sessions.fingerprint

    def at(self, point: str | OperatingPoint) -> Self:
        """This cascade at another operating point, over the same sessions."""
        chosen = point if isinstance(point, OperatingPoint) else self.calibration.point(point)
        return type(self)(self.bundle, self.calibration, chosen, self._sessions, self._batch_rows)

    def preprocess(self, rows: Iterable[Any]) -> Arrays:
        """Raw rows as the inputs that `predict` takes: texts, or PNG and JPEG pictures (paths, bytes, uint8 arrays).

        Raises InputError if the bundle says nothing about raw rows, or naming the row at fault;
        RuntimeUnavailable with the command that installs what is missing.
        """
        if self._preprocessor is None:
            self._preprocessor = from_bundle(self.bundle)
        return self._preprocessor(rows)

    def close(self) -> None:
        """Let the sessions go, for every cascade that shares them. Calls that are under way finish."""
        self._sessions.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def row_flops(self, sizes: Mapping[str, int]) -> NDArray[np.int64]:
        """(J,) cumulative: what one row costs that leaves at each exit, at these axis sizes.

        sizes: a whole number of at least 1 for each symbolic axis but the batch.
        """
        for axis in self.manifest.axes[1:]:
            size = sizes.get(axis)
            if not isinstance(size, int | np.integer) or size < 1:
                raise InputError(f"sizes[{axis!r}] is {size!r}, expected a whole number of at least 1.")
        return self._route.costs(sizes).exits

    def predict(
        self, inputs: Mapping[str, Any], *, fetch: Iterable[str] = (), allow_nonfinite: bool = False
    ) -> Predictions:
        """Answer N rows.

        inputs: arrays by name, N along each one's batch axis; N may be 0. fetch: "probabilities" and
        "routing" to have them with the answer. allow_nonfinite: let NaN and ±inf in float inputs pass; a row
        whose logits are NaN runs to the last exit, has the label -1 and abstains.

        A row's answer doesn't depend on the rows beside it. Raises InputError naming the input at fault,
        CascadeClosed after close() or in a forked process.
        """
        wanted = (fetch,) if isinstance(fetch, str) else tuple(fetch)
        for kind in wanted:
            if kind not in FETCHABLE:
                raise InputError(f"fetch has {kind!r}, expected any of {FETCHABLE}.")
        arrays, sizes = check_inputs(inputs, self.manifest, allow_nonfinite=allow_nonfinite)
        limit = self._batch_rows if self.manifest.rows_independent else 1

        def again(kind: str) -> Any:
            return self.predict(inputs, fetch=(kind,), allow_nonfinite=allow_nonfinite)._get(kind)

        if self._switches is not None and "routing" not in wanted and not self._route.needs_routing:
            return answer_cascade_graph(self._route, self.run_nested, arrays, sizes, wanted, limit, again)
        return Run(self._route, self._values, arrays, sizes, wanted, limit).answer(wanted, again)

    def record(self, inputs: Mapping[str, Any], *, allow_nonfinite: bool = False) -> Records:
        """Run every exit for every row; nothing leaves. Inputs and errors as in `predict`."""
        arrays, sizes = check_inputs(inputs, self.manifest, allow_nonfinite=allow_nonfinite)
        manifest, rows = self.manifest, sizes["batch"]
        step = self._batch_rows if manifest.rows_independent else 1
        stages = plan(manifest, range(len(manifest.exits)))
        recorded = {
            name
            for e in manifest.exits
            for name in (e.logits, e.label, e.score, e.features, e.external, e.reservation, *e.routing)
            if name is not None
        }
        parts: list[Arrays] = []
        for start in range(0, rows, step):
            ids = np.arange(start, min(start + step, rows))
            state = {
                i.name: np.take(arrays[i.name], ids, axis=i.batch_axis) if rows > step else arrays[i.name]
                for i in manifest.inputs
            }
            kept: Arrays = {}
            for stage in stages:
                made = self.run_graph(stage.graph, state, stage.graph.outputs)
                kept.update((name, made[name]) for name in recorded & made.keys())
                state = {name: (made | state)[name] for name in stage.passes}
            parts.append(kept)
        return self._records(parts, rows, sizes)

    def _records(self, parts: list[Arrays], rows: int, sizes: Mapping[str, int]) -> Records:
        exits = self.manifest.exits

        def column(name: str, empty: tuple[int, ...], dtype: Any) -> NDArray[Any]:
            return np.concatenate([p[name] for p in parts]) if parts else np.zeros(empty, dtype)

        def stack(names: list[str], empty: tuple[int, ...] = (0,), dtype: Any = np.float32) -> NDArray[Any]:
            return np.stack([column(n, empty, dtype) for n in names])

        def per_exit(names: list[str | None]) -> NDArray[Any] | None:
            present = [n for n in names if n is not None]
            return stack(present) if present else None

        score = stack([e.score for e in exits])
        return Records(
            logits=stack([e.logits for e in exits], (0, len(self.classes))),
            score=score,
            label=np.where(np.isnan(score), -1, stack([e.label for e in exits], dtype=np.int64)),
            flops=np.repeat(self.row_flops(sizes)[:, None], rows, axis=1),
            features=tuple(column(e.features, (0,), np.float32) for e in exits if e.features is not None) or None,
            routing=stack(self.manifest.routing) if self.manifest.routing else None,
            external=per_exit([e.external for e in exits]),
            reservation=per_exit([e.reservation for e in exits]),
            routing_seen=self.manifest.routing_seen if self.manifest.routing else None,
        )

    def run_graph(self, graph: Block | Segment, state: Mapping[str, Any], outputs: Sequence[str]) -> Arrays:
        """Run one block or segment on the state in front of it: the outputs asked for, by name.

        Raises InputError for values the graph can't run on, CascadeClosed.
        """
        return dict(zip(outputs, self._values(graph, state, list(outputs)), strict=True))

    def _values(self, graph: Block | Segment, state: Mapping[str, Any], outputs: list[str]) -> list[Any]:
        feed = self._gate_inputs.copy()
        for name in graph.inputs:
            feed[name] = state[name]
        return self._run(graph.file, feed, outputs)

    def _run(self, file: str, feed: Mapping[str, Any], outputs: list[str]) -> list[Any]:
        run = self._sessions.get(file)
        try:
            return run(outputs, feed)
        except Exception as error:  # ONNX Runtime's exceptions have no base of their own
            if "llocat" in str(error) or "CUDA" in str(error):
                raise
            raise InputError(
                f"{file} can't run on these values ({reason(error)}): "
                "for instance an id outside the vocabulary, or a row longer than the model takes."
            ) from error


def _check_batch_rows(rows: Any) -> None:
    if not isinstance(rows, int | np.integer) or isinstance(rows, bool) or rows < 1:
        raise InputError(f"batch_rows is {rows!r}, expected a whole number of at least 1.")


def switches(nested: CascadeGraph, thresholds: Sequence[float]) -> dict[str, NDArray[Any]]:
    """What the cascade graph takes beside its inputs, for the thresholds of all exits but the last."""
    bars = np.full(nested.gates - 1, np.inf, np.float32)
    for gate, threshold in zip(nested.exits[:-1], thresholds, strict=True):
        bars[gate] = _round_up(threshold)
    return dict(zip(CASCADE_INPUTS, (bars, bars < np.inf), strict=True))


def _round_up(threshold: float) -> np.float32:
    """The least float32 that isn't below: a float32 score reaches the one exactly if it reaches the other."""
    with np.errstate(over="ignore"):
        near = np.float32(threshold)
        return near if float(near) >= threshold else np.nextafter(near, np.float32(np.inf))


def reason(error: Exception) -> str:
    """What ONNX Runtime says went wrong, without the places in its source where it noticed."""
    message = " ".join(str(error).rpartition("Status Message: ")[2].split())
    return re.sub(r"^/\S+:\d+ .*?(was false\.|\)) ", "", message)


def _warn_of_dead_exits(point: OperatingPoint) -> None:
    """Say so when an exit is switched on but can't be reached: it only costs its head's time."""
    shares = point.expected.get("exit_shares", ())
    for j, threshold in enumerate(point.thresholds):
        unused = j < len(shares) and shares[j] == 0
        if np.isfinite(threshold) and (threshold > LARGEST or unused):
            warnings.warn(
                f"operating point {point.name!r}: exit {j} has the threshold {threshold:g}, which no row reached "
                "at calibration. Set it to +inf to switch the exit off.",
                stacklevel=3,
            )
