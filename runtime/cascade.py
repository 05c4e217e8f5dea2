"""The cascade: blocks in series, a gate after each, and only the rows that stay go on."""

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from offramp.runtime import cost
from offramp.runtime.bundle import GATE_INPUTS, Bundle, Manifest, read_bundle
from offramp.runtime.errors import CascadeClosed, InputError
from offramp.runtime.gate import Gate, State
from offramp.runtime.inputs import Arrays, check_inputs
from offramp.runtime.points import FULL, Calibration, OperatingPoint, read_calibration
from offramp.runtime.predictions import Predictions, Records
from offramp.runtime.scores import LARGEST
from offramp.runtime.session import available_threads, open_session, resolve_providers
from offramp.runtime.survivors import GONE, Ids, Survivors, gathering_pays

FETCHABLE = ("probabilities", "routing")
_BATCH_ROWS = 128


@dataclass
class _Sessions:
    """The open sessions of a bundle, shared by every cascade made from it with `at`."""

    blocks: list[Any]
    process: int

    def block(self, index: int) -> Any:
        if not self.blocks:
            raise CascadeClosed("this cascade is closed: load it again.")
        if self.process != os.getpid():
            raise CascadeClosed(
                f"this cascade was loaded in process {self.process} and a forked process can't use its threads: "
                "call Cascade.load in the process that predicts."
            )
        return self.blocks[index]


class Cascade:
    """A bundle ready to answer, at one operating point. Any number of threads may use it at once."""

    def __init__(
        self,
        bundle: Bundle,
        calibration: Calibration,
        point: OperatingPoint,
        sessions: _Sessions,
        batch_rows: int,
    ) -> None:
        self.bundle = bundle
        self.calibration = calibration
        self.operating_point = point
        self._sessions = sessions
        self._batch_rows = batch_rows
        self._gate = Gate(point, len(self.manifest.exits))
        self._graphs = _Graphs(self.manifest)
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
        batch_rows: int = _BATCH_ROWS,
    ) -> Self:
        """Read, verify and open a bundle.

        device: "cpu" or "cuda". operating_point: one of the bundle's by name, or your own.
        threads: intra-op threads a session; default what affinity and control group allow.
        providers: ONNX Runtime execution providers, instead of the device's own.
        batch_rows: the most rows a block runs at once; larger inputs go through in pieces.

        Raises BundleError (nothing has been run then), InputError, RuntimeUnavailable.
        """
        if threads is not None and (not isinstance(threads, int) or threads < 1):
            raise InputError(f"threads is {threads!r}, expected a whole number of at least 1.")
        if batch_rows < 1:
            raise InputError(f"batch_rows is {batch_rows!r}, expected at least 1.")
        bundle = read_bundle(path)
        calibration = read_calibration(bundle.path, bundle.manifest)
        point = operating_point if isinstance(operating_point, OperatingPoint) else calibration.point(operating_point)
        chosen = resolve_providers(device, providers)
        count = threads or available_threads()
        sessions = [
            open_session(bundle.file(block.file), threads=count, providers=chosen) for block in bundle.manifest.blocks
        ]
        return cls(bundle, calibration, point, _Sessions(sessions, os.getpid()), batch_rows)

    @property
    def manifest(self) -> Manifest:
        return self.bundle.manifest

    @property
    def classes(self) -> list[str]:
        return self.manifest.classes

    def at(self, point: str | OperatingPoint) -> Self:
        """This cascade at another operating point, over the same sessions."""
        chosen = point if isinstance(point, OperatingPoint) else self.calibration.point(point)
        return type(self)(self.bundle, self.calibration, chosen, self._sessions, self._batch_rows)

    def close(self) -> None:
        """Let the sessions go, for every cascade that shares them. Calls that are under way finish."""
        self._sessions.blocks = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def row_flops(self, sizes: Mapping[str, int]) -> NDArray[np.int64]:
        """(J,) cumulative: what one row costs that leaves at each exit, at these axis sizes."""
        alone = {**sizes, "batch": 1}
        spent = np.cumsum([cost.evaluate(block.flops, alone) for block in self.manifest.blocks])
        return np.asarray([spent[e.block] for e in self.manifest.exits], np.int64)

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
        wanted = tuple(fetch)
        for kind in wanted:
            if kind not in FETCHABLE:
                raise InputError(f"fetch has {kind!r}, expected any of {FETCHABLE}.")
        arrays, sizes = check_inputs(inputs, self.manifest, allow_nonfinite=allow_nonfinite)
        run = _Run(self, arrays, sizes, wanted)
        run.all()
        answer = run.answer
        return replace(
            answer,
            label=np.where(np.isnan(answer.score), -1, answer.label),
            executed=tuple(run.executed),
            _fetched=run.fetched(),
            _again=lambda kind: self.predict(inputs, fetch=(kind,), allow_nonfinite=allow_nonfinite)._get(kind),
        )

    def record(self, inputs: Mapping[str, Any], *, allow_nonfinite: bool = False) -> Records:
        """Run every exit for every row; nothing leaves. Inputs and errors as in `predict`."""
        arrays, sizes = check_inputs(inputs, self.manifest, allow_nonfinite=allow_nonfinite)
        manifest, rows = self.manifest, sizes["batch"]
        step = self._batch_rows if manifest.rows_independent else 1
        parts: list[Arrays] = []
        for start in range(0, rows, step):
            ids = np.arange(start, min(start + step, rows))
            state = {
                i.name: np.take(arrays[i.name], ids, axis=i.batch_axis) if rows > step else arrays[i.name]
                for i in manifest.inputs
            }
            kept: Arrays = {}
            for k, block in enumerate(manifest.blocks):
                made = self._run_block(k, state, block.outputs)
                kept.update((name, made[name]) for name in self._graphs.recorded & made.keys())
                state = {name: (made | state)[name] for name in self._graphs.alive_after[k]}
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
        )

    def _run_block(self, index: int, state: Arrays, outputs: Sequence[str]) -> Arrays:
        block = self.manifest.blocks[index]
        feed = {name: state[name] for name in block.inputs} | self._graphs.gate
        session = self._sessions.block(index)
        try:
            return dict(zip(outputs, session.run(list(outputs), feed), strict=True))
        except Exception as error:  # ONNX Runtime's exceptions have no base of their own
            if "llocat" in str(error) or "CUDA" in str(error):
                raise
            raise InputError(
                f"block {index} can't run on these values ({str(error).rpartition('Status Message: ')[2].strip()}): "
                "for instance an id outside the vocabulary, or a row longer than the model takes."
            ) from error


class _Graphs:
    """What follows from the manifest alone: which tensors live between which blocks, and along which axis."""

    def __init__(self, manifest: Manifest) -> None:
        axes = {i.name: i.batch_axis for i in manifest.inputs} | {n: t.batch_axis for n, t in manifest.tensors.items()}
        self.shapes = {i.name: (i.dtype, i.shape) for i in manifest.inputs} | {
            n: (t.dtype, t.shape) for n, t in manifest.tensors.items()
        }
        self.batch_axes: list[dict[str, int]] = []  # of what waits in front of each block
        self.alive_after: list[list[str]] = []
        blocks = manifest.blocks
        for k in range(len(blocks) + 1):
            made = {name for block in blocks[:k] for name in block.outputs} | {i.name for i in manifest.inputs}
            later = dict.fromkeys(name for block in blocks[k:] for name in block.inputs if name in made)
            self.batch_axes.append({name: axes[name] for name in later})
        for k in range(len(blocks)):
            self.alive_after.append(list(self.batch_axes[k + 1]))
        self.recorded = {
            name
            for e in manifest.exits
            for name in (e.logits, e.label, e.score, e.features, e.external, e.reservation, *e.routing)
            if name is not None
        }
        classes = len(manifest.classes)
        ones, zeros = np.ones(classes, np.float32), np.zeros(classes, np.float32)
        self.gate = dict(zip(GATE_INPUTS, (ones, zeros, ones), strict=True))

    def row_bytes(self, block: int, sizes: Mapping[str, int]) -> int:
        """Bytes of one row waiting in front of a block."""
        total = 0
        for name in self.batch_axes[block]:
            dtype, shape = self.shapes[name]
            elements = 1
            for size in shape:
                known = size if isinstance(size, int) else cost.evaluate(size, {**sizes, "batch": 1})
                elements *= known
            total += elements * np.dtype(dtype).itemsize
        return total


class _Run:
    """One call of predict: a queue in front of each block, emptied deepest-first whenever a batch is full."""

    def __init__(self, cascade: Cascade, arrays: Arrays, sizes: Mapping[str, int], fetch: tuple[str, ...]) -> None:
        self.cascade = cascade
        manifest = cascade.manifest
        rows = sizes["batch"]
        self._fetch = fetch
        self._sizes = sizes
        self._limit = cascade._batch_rows if manifest.rows_independent else 1
        self._flops = cascade.row_flops(sizes)
        alone = {**sizes, "batch": 1}
        self._block_flops = [cost.evaluate(block.flops, alone) for block in manifest.blocks]
        self._row_bytes = [cascade._graphs.row_bytes(k, sizes) for k in range(len(manifest.blocks))]
        self._queues = [Survivors(cascade._graphs.batch_axes[k]) for k in range(len(manifest.blocks))]
        if rows:
            self._queues[0].push(arrays, np.arange(rows))
        self._state: State | None = None
        self.executed = [0] * len(manifest.blocks)
        self.answer = Predictions(
            label=np.zeros(rows, np.int64),
            confidence=np.zeros(rows, np.float64),
            score=np.zeros(rows, np.float32),
            exit=np.zeros(rows, np.int32),
            abstain=np.zeros(rows, np.bool_),
            flops=np.zeros(rows, np.int64),
        )
        self._probabilities = np.zeros((rows, len(manifest.classes)), np.float32) if "probabilities" in fetch else None
        routed = "routing" in fetch or any("routing" in cascade._gate.needs(j) for j in range(len(manifest.exits)))
        self._routing = np.full((len(manifest.routing), rows), np.nan, np.float32) if routed else None

    def fetched(self) -> dict[str, Any]:
        kinds = {"probabilities": self._probabilities, "routing": self._routing}
        return {kind: kinds[kind] for kind in self._fetch}

    def all(self) -> None:
        while True:
            waiting = [k for k, queue in enumerate(self._queues) if len(queue)]
            if not waiting:
                return
            ready = [k for k in waiting if len(self._queues[k]) >= self._limit]
            # Full batches deepest first, so that little waits; then the rest from the front, so that it fills up.
            self._step(ready[-1] if ready else waiting[0])

    def _step(self, k: int) -> None:
        """Run block k for the rows at the head of its queue, answer those that leave, queue the rest."""
        graphs, manifest = self.cascade._graphs, self.cascade.manifest
        block = manifest.blocks[k]
        arrays, ids = self._queues[k].take(self._limit)
        here = ids != GONE
        wanted = [name for name in graphs.alive_after[k] if name in block.outputs]
        j = block.exit
        if j is not None and not self._is_open(j):
            j = None
        if j is not None:
            wanted += [manifest.exits[j].label, manifest.exits[j].score]
            if self._needs_logits(j):
                wanted.append(manifest.exits[j].logits)
        routing = [name for name in manifest.routing if name in block.outputs] if self._routing is not None else []
        made = self.cascade._run_block(k, arrays, list(dict.fromkeys(wanted + routing)))
        self.executed[k] += self._block_flops[k] * len(ids)
        if self._routing is not None:
            for name in routing:
                self._routing[manifest.routing.index(name), ids[here]] = made[name][here]
        if j is not None:
            here &= ~self._answer(j, made, ids, here)
        if k + 1 < len(manifest.blocks) and here.any():
            self._pass_on(k + 1, {**arrays, **made}, ids, here)

    def _is_open(self, exit: int) -> bool:
        return self.cascade.operating_point.thresholds[exit] != np.inf

    def _needs_logits(self, exit: int) -> bool:
        return self._probabilities is not None or bool(self.cascade._gate.needs(exit) & {"logits", "entropy"})

    def _answer(self, j: int, made: Arrays, ids: Ids, here: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Ask the gate about exit j and write down the answers of the rows that leave. Returns who does."""
        gate, exit_, answer = self.cascade._gate, self.cascade.manifest.exits[j], self.answer
        label, score = made[exit_.label], made[exit_.score]
        aux = {"logits": made[exit_.logits]} if exit_.logits in made else {}
        if "routing" in gate.needs(j) and self._routing is not None:
            aux["routing"] = self._routing[: len(exit_.routing), ids]  # the layers run so far
        state = None if self._state is None else {name: values[ids] for name, values in self._state.items()}
        decision = gate.decide(j, label, score, aux, state)
        self._remember(decision.state, ids, here)
        leave = here & decision.leave
        rows = ids[leave]
        answer.label[rows] = label[leave]
        answer.confidence[rows] = decision.confidence[leave]
        answer.score[rows] = score[leave]
        answer.exit[rows] = j
        answer.abstain[rows] = decision.abstain[leave]
        answer.flops[rows] = self._flops[j]
        if self._probabilities is not None and len(rows):
            apply = gate.calibrators[j].apply
            picked = {name: values[..., leave] if name == "routing" else values[leave] for name, values in aux.items()}
            finite = ~np.isnan(score[leave])
            logits = picked.pop("logits")
            self._probabilities[rows] = np.nan
            self._probabilities[rows[finite]] = apply(
                logits[finite], {name: values[..., finite] for name, values in picked.items()}
            )
        return leave

    def _remember(self, state: State | None, ids: Ids, here: NDArray[np.bool_]) -> None:
        if state is None:
            return
        if self._state is None:
            rows = len(self.answer)
            self._state = {name: np.zeros((rows, *v.shape[1:]), v.dtype) for name, v in state.items()}
        for name, values in state.items():
            self._state[name][ids[here]] = values[here]

    def _pass_on(self, k: int, arrays: Arrays, ids: Ids, stays: NDArray[np.bool_]) -> None:
        live = int(stays.sum())
        gone = len(ids) - live
        if gone and gathering_pays(live, gone, self._row_bytes[k], self._block_flops[k]):
            positions = np.flatnonzero(stays)
            self._queues[k].push(arrays, ids[positions], positions)
        else:
            self._queues[k].push(arrays, np.where(stays, ids, GONE))


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
