"""The cascade: blocks in series, a gate after each, and only the rows that stay go on."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from time import monotonic, perf_counter
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from offramp.runtime.bundle import Block, Bundle, Manifest, Segment, read_bundle
from offramp.runtime.calibration_file import Calibration, read_calibration
from offramp.runtime.errors import BundleError, InputError, RuntimeUnavailable
from offramp.runtime.execution.anytime import exit_by_exit
from offramp.runtime.execution.call import Call
from offramp.runtime.execution.executor import Executor, ShortWay, open_executor
from offramp.runtime.execution.route import Route
from offramp.runtime.execution.stages import plan
from offramp.runtime.gate import Gate
from offramp.runtime.inputs import Arrays, check_inputs, rows_of
from offramp.runtime.online.learning import Learning
from offramp.runtime.online.online import Online
from offramp.runtime.points import FULL, OperatingPoint
from offramp.runtime.predictions import Predictions, Records, Said, Seen
from offramp.runtime.preprocess import Preprocessor, Text
from offramp.runtime.thresholds.rule import reached

FETCHABLE = ("probabilities", "routing", "times")


class Cascade:
    """A bundle ready to answer, at one operating point. Any number of threads may use it at once."""

    def __init__(
        self,
        bundle: Bundle,
        calibration: Calibration,
        point: OperatingPoint,
        executor: Executor,
        *,
        batch_rows: int | None = None,
        preprocessor: Callable[[], Preprocessor] | None = None,
        learning: Learning | None = None,
    ) -> None:
        """batch_rows: the most rows a block runs at once; the executor's own by default.

        preprocessor: gives the bundle's, made when first asked for. learning: where rows are kept and labels come to.
        """
        self.bundle = bundle
        self.calibration = calibration
        self.operating_point = point
        self.executor = executor
        self.batch_rows = batch_rows or executor.batch_rows
        self.route = Route(bundle.manifest, Gate(point, len(bundle.manifest.exits)))
        self._shortened: dict[int, Route] = {}
        self._preprocessor = preprocessor or lru_cache(maxsize=1)(bundle.preprocessor)
        self.learning, self._version = learning, 0
        self._prepared = self._prepare(0)
        self._options: dict[str, Any] | None = None  # of `load`, where it made this
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
        spin_us: int = 0,
        recalibration: Online | None = None,
    ) -> Self:
        """Read, verify and open a bundle.

        device: "cpu"; "cuda" or "cuda:N", by ONNX Runtime's CUDA provider where it is, else by torch; "torch:cpu" or
        "torch:cuda", by torch in any case. operating_point: one of the bundle's by name, or your own.
        threads: intra-op threads a session; default what affinity and control group allow.
        providers: ONNX Runtime execution providers, instead of the device's own.
        batch_rows: the most rows a block runs at once, 128 by default, 1,024 on a GPU; larger inputs go
        through in pieces. spin_us: microseconds that a CPU's threads wait awake for the next operation: 0 is best for
        rows that come one by one with pauses, 20 where one batch follows on the other. recalibration: keep what is
        answered, and learn from labels that come to `feedback`; a point made online takes the place of the bundle's of
        that name.

        Raises BundleError (nothing has been run then), InputError, RuntimeUnavailable.
        """
        if batch_rows is not None:
            _check_batch_rows(batch_rows)
        if recalibration is not None and not isinstance(recalibration, Online):
            raise InputError(f"recalibration is {recalibration!r:.80}, expected Online(path).")
        bundle = read_bundle(path, hold=True)
        calibration = read_calibration(bundle.path, bundle.manifest)
        point = operating_point if isinstance(operating_point, OperatingPoint) else calibration.point(operating_point)
        executor = open_executor(bundle, device, threads=threads, providers=providers, spin_us=spin_us)
        learning = None if recalibration is None else Learning(recalibration, bundle.manifest, calibration)
        cascade = cls(bundle, calibration, point, executor, batch_rows=batch_rows, learning=learning)
        cascade._options = {
            "device": device,
            "threads": threads,
            "providers": providers,
            "batch_rows": batch_rows,
            "spin_us": spin_us,
            "recalibration": recalibration,
        }
        # What this point needs; other graphs when they are asked for.
        executor.open(cascade.route, every_exit=learning is not None)
        return cascade

    @property
    def manifest(self) -> Manifest:
        return self.bundle.manifest

    @property
    def classes(self) -> list[str]:
        return self.manifest.classes

    @property
    def fingerprint(self) -> str:
        """What decides the last bits of an answer beside the bundle: the library, its providers and threads."""
        return self.executor.fingerprint

    @property
    def exits(self) -> list[str]:
        """The exits' names, from the first to the last."""
        return [one.name for one in self.manifest.exits]

    @property
    def operating_points(self) -> Mapping[str, OperatingPoint]:
        """The bundle's operating points by name, `full` among them."""
        return self.calibration.points

    def __repr__(self) -> str:
        manifest, point = self.manifest, self.operating_point
        return (
            f"<Cascade {manifest.name!r} {manifest.version}: {len(manifest.exits)} exits, {len(self.classes)} classes, "
            f"at {point.name!r} (leaves at {', '.join(map(str, point.exits))}), {self.fingerprint}>"
        )

    def at(self, point: str | OperatingPoint) -> Self:
        """This cascade at another operating point, over the same executor."""
        chosen = point if isinstance(point, OperatingPoint) else self.calibration.point(point)
        made = type(self)(
            self.bundle,
            self.calibration,
            chosen,
            self.executor,
            batch_rows=self.batch_rows,
            preprocessor=self._preprocessor,
            learning=self.learning,
        )
        made._options = self._options
        return made

    def __reduce__(self) -> tuple[Callable[..., "Cascade"], tuple[Any, ...]]:
        """Pickled as where its bundle lies and how it was loaded: who unpickles it loads it again, in that process.

        Raises InputError for one that `load` didn't make.
        """
        if self._options is None:
            raise InputError("a cascade over an executor of your own can't be pickled: load it where it is needed.")
        path = self.bundle.path.absolute()
        return _load_again, (type(self), path, self.manifest.digest, self.operating_point, self._options)

    def preprocess(self, rows: Iterable[Any]) -> Arrays:
        """Raw rows as the inputs that `predict` takes: texts, or PNG and JPEG pictures (paths, bytes, uint8 arrays).

        Raises InputError if the bundle says nothing about raw rows, or naming the row at fault;
        RuntimeUnavailable with the command that installs what is missing.
        """
        return self._preprocessor()(rows)

    def preprocess_by_length(self, rows: Iterable[Any]) -> list[tuple[NDArray[np.int64], Arrays]]:
        """As `preprocess`, in parts: (positions, inputs), where no row is padded because of its neighbours."""
        return self._preprocessor().parts(rows)

    def warm_up(self, sizes: Mapping[str, int] | None = None) -> None:
        """Do now what would otherwise be done for the first request: lazy imports, first runs, on a GPU its captures.

        sizes: of symbolic axes beside the batch, {"seq": 32} say; those that aren't named are as at the bundle's
        verification. On a GPU call it once for each length that will come often.
        """
        given = dict(sizes or {})
        for axis in given:
            if axis not in self.manifest.axes[1:]:
                raise InputError(f"sizes names the axis {axis!r}, this model's are {list(self.manifest.axes[1:])}.")
        axes = {**self.manifest.typical_sizes, **given}
        self._check_sizes(axes)
        self._warm_up_preprocessor()
        route, keeps = self.route.out_of_reach(), self.learning is not None
        self.executor.warm_up(route, axes, self.batch_rows, every_exit=keeps)

    def _warm_up_preprocessor(self) -> None:
        spec = self.manifest.preprocess
        if spec is None:
            return
        try:
            if isinstance(spec, Text):
                self.preprocess(spec.sample or ["a text"])
            else:
                self.preprocess([np.zeros((spec.height, spec.width, 3), np.uint8)])
        except RuntimeUnavailable:  # arrays can be served all the same
            return

    def close(self) -> None:
        """Let graphs and memory go, for every cascade that shares the executor. Calls that are under way finish."""
        self.executor.close()
        if self.learning is not None:
            self.learning.close()

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
        self._check_sizes(sizes)
        return self.route.costs(sizes).exits

    def _check_sizes(self, sizes: Mapping[str, int]) -> None:
        for axis in self.manifest.axes[1:]:
            size = sizes.get(axis)
            if not isinstance(size, int | np.integer) or size < 1:
                raise InputError(f"sizes[{axis!r}] is {size!r}, expected a whole number of at least 1.")

    def predict(
        self,
        inputs: Mapping[str, Any],
        *,
        fetch: Iterable[str] = (),
        allow_nonfinite: bool = False,
        max_exit: int | None = None,
        deadline: float | None = None,
        stop: Callable[[], bool] | None = None,
        seen: Seen | None = None,
    ) -> Predictions:
        """Answer N rows.

        inputs: arrays by name, N along each one's batch axis; N may be 0. fetch: "probabilities" and "routing" to have
        them with the answer; "times" to know when each row and exit had its own, which goes from block to block.
        allow_nonfinite: let NaN and ±inf in float inputs pass; a row whose logits are NaN runs to the last exit, has
        the label -1 and abstains.
        max_exit: the last exit a row may leave from. Where the point has that exit switched off, as `full` has all but
        the last, confidence there is by the calibrator of another of the bundle's points, if any has one: see
        `Calibration.stopping_at`. deadline: seconds from now after which nothing more is begun; the first open exit
        always answers, a block that runs is waited for; it goes from block to block. Rows that either cut short have
        the answer of the last open exit that they reached, and are `involuntary`.
        stop: asked in front of each batch, and of each block where blocks are run one by one; once it says yes nothing
        more is begun and Stopped is raised. seen: to be filled with what every exit says that runs, by whoever keeps
        that himself: the cascade then keeps none of it.

        A row's answer doesn't depend on the rows beside it. Raises InputError naming the input at fault,
        CascadeClosed after close() or in a forked process.
        """
        learning = None if seen is not None else self.learning
        if learning is not None and learning.version != self._version:
            self._take_up(learning)
        plain = max_exit is None and deadline is None and not (fetch or allow_nonfinite)
        if plain and self._prepared is not None and seen is None:
            out = self._prepared(inputs, stop)
            if out is not None:
                return out
        latest = None if deadline is None else monotonic() + _seconds(deadline)
        wanted = (fetch,) if isinstance(fetch, str) else tuple(fetch)
        for kind in wanted:
            if kind not in FETCHABLE:
                raise InputError(f"fetch has {kind!r}, expected any of {FETCHABLE}.")
        arrays, sizes = check_inputs(inputs, self.manifest, allow_nonfinite=allow_nonfinite)
        route = self.route if max_exit is None else self._route_to(max_exit)
        if learning is not None:
            seen = Seen(len(self.exits), sizes["batch"])
        version = self._version
        call = Call(route, arrays, sizes, wanted, limit=self.batch_rows, stop=stop, seen=seen)

        def again(kind: str) -> Predictions:
            return self._fetch_again(inputs, kind, allow_nonfinite, max_exit, timed="times" in wanted)

        if latest is None and "times" not in wanted and (seen is None or self.executor.fills(call)):
            out = self.executor.answer(call, again)
        else:
            started = perf_counter()
            with self.executor.held():
                for j in exit_by_exit(call, self.executor, lambda: latest is not None and monotonic() >= latest):
                    call.times[j] = perf_counter() - started
            out = call.predictions(again if latest is None else _not_kept)
        if max_exit is not None:
            out = out.cut_short((out.exit == max_exit) & ~reached(out.score, self.operating_point.thresholds[max_exit]))
        if learning is None or seen is None:
            return out
        cut = max_exit is not None and max_exit < len(self.exits) - 1
        return self._keep(version, out, seen, arrays, allow_nonfinite=allow_nonfinite, cut=cut)

    def _prepare(self, version: int) -> ShortWay | None:
        """version: of the calibration that the route is by."""
        keep = None if self.learning is None else partial(self._keep, version)
        return self.executor.prepare(self.route, self.batch_rows, self._fetch_again, keep)

    def _keep(
        self,
        version: int,
        out: Predictions,
        seen: Said,
        inputs: Mapping[str, Any],
        *,
        allow_nonfinite: bool = False,
        cut: bool = False,
    ) -> Predictions:
        """Answers of the calibration of a version, by the ids that they are kept by. cut: as `Learning.keep` has it."""
        record = partial(self.record, allow_nonfinite=allow_nonfinite)
        name = self.operating_point.name
        return out.named(self.recalibration.keep(version, name, out, seen, inputs, record, cut=cut))

    @property
    def recalibration(self) -> Learning:
        """What this cascade has kept and learnt. Raises InputError where it was loaded without `recalibration`."""
        if self.learning is None:
            raise InputError("this cascade keeps nothing: load it with recalibration=Online(path).")
        return self.learning

    def feedback(self, ids: Sequence[str], labels: Any, *, key: str | None = None, asked: Any = None) -> list[Any]:
        """Labels of answered rows, by `Predictions.ids`; as `Learning.feedback`."""
        return self.recalibration.feedback(ids, labels, key, asked)

    def _take_up(self, learning: Learning) -> None:
        """Serve the calibration that is in force now. Calls that are under way finish with the one before."""
        version, calibration = learning.in_force
        point = calibration.points.get(self.operating_point.name)
        if point is not None and self.calibration.points.get(point.name) == self.operating_point:
            self.operating_point = point
            self.route = Route(self.manifest, Gate(point, len(self.exits)))
        self._prepared = self._prepare(version)
        self.calibration, self._shortened, self._version = calibration, {}, version

    def _fetch_again(
        self,
        inputs: Mapping[str, Any],
        kind: str,
        allow_nonfinite: bool = False,
        max_exit: int | None = None,
        timed: bool = False,
    ) -> Predictions:
        """timed: by the way that was taken to know the times, whose last bits may differ from the others'."""
        if kind == "times":
            raise InputError('times can\'t be got afterwards: predict with fetch=("times",).')
        fetch = (kind, "times") if timed else (kind,)
        asked = self if self.learning is None else self._forgetful()  # they are kept already
        return asked.predict(inputs, fetch=fetch, allow_nonfinite=allow_nonfinite, max_exit=max_exit)

    def _forgetful(self) -> Self:
        """This cascade, keeping nothing."""
        return type(self)(
            self.bundle, self.calibration, self.operating_point, self.executor, batch_rows=self.batch_rows
        )

    def anytime(self, inputs: Mapping[str, Any], *, allow_nonfinite: bool = False) -> Iterator[Predictions]:
        """The answers so far, each time an open exit has answered all rows that came to it; the last are `predict`'s.

        Rows that have left keep their answer; those that go on have that exit's and are `involuntary`. Stop looking
        and nothing more is run. Inputs and errors as in `predict`, at the first look.
        """
        arrays, sizes = check_inputs(inputs, self.manifest, allow_nonfinite=allow_nonfinite)
        call = Call(self.route, arrays, sizes, limit=self.batch_rows)
        with self.executor.held():
            for _ in exit_by_exit(call, self.executor):
                yield call.predictions(_not_kept, so_far=True)

    def _route_to(self, exit: int) -> Route:
        """This point's route if nobody goes past an exit. There are few exits, so all are kept."""
        last = len(self.manifest.exits) - 1
        if not isinstance(exit, int | np.integer) or isinstance(exit, bool) or not 0 <= exit <= last:
            raise InputError(f"max_exit is {exit!r}, expected 0 to {last} (the exits {self.exits}).")
        if exit not in self._shortened:
            gate = Gate(self.calibration.stopping_at(self.operating_point, int(exit)), last + 1)
            self._shortened[int(exit)] = Route(self.manifest, gate)
        return self._shortened[int(exit)]

    def record(self, inputs: Mapping[str, Any], *, allow_nonfinite: bool = False) -> Records:
        """Run every exit for every row; nothing leaves. Inputs and errors as in `predict`."""
        arrays, sizes = check_inputs(inputs, self.manifest, allow_nonfinite=allow_nonfinite)
        manifest, rows = self.manifest, sizes["batch"]
        step = self.batch_rows if manifest.rows_independent else 1
        stages = plan(manifest, range(len(manifest.exits)))
        recorded = {
            name
            for e in manifest.exits
            for name in (e.logits, e.label, e.score, e.features, e.external, e.reservation, *e.routing)
            if name is not None
        }
        parts: list[Arrays] = []
        with self.executor.held():
            for start in range(0, rows, step):
                piece = arrays if rows <= step else rows_of(arrays, manifest, start, start + step)
                state = self.executor.put(piece)
                kept: dict[str, Any] = {}
                for stage in stages:
                    made = self.executor.run(stage.graph, state, stage.graph.outputs)
                    kept.update((name, made[name]) for name in recorded & made.keys())
                    state = {name: made[name] if name in made else state[name] for name in stage.passes}
                parts.append(self.executor.fetch(kept))
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
        """Run one block or segment on the state in front of it, arrays in and out: the outputs asked for, by name.

        Raises InputError for values the graph can't run on, CascadeClosed.
        """
        with self.executor.held():
            given = self.executor.put({name: state[name] for name in graph.inputs})
            return self.executor.fetch(self.executor.run(graph, given, outputs))


def _seconds(deadline: Any) -> float:
    if isinstance(deadline, bool) or not isinstance(deadline, int | float | np.number) or not deadline >= 0:
        raise InputError(f"deadline is {deadline!r}, expected seconds from now, a number of at least 0.")
    return float(deadline)


def _not_kept(kind: str) -> Predictions:
    raise InputError(f"{kind} of answers that may have been cut short can't be got afterwards: ask with fetch.")


def _load_again(
    kind: type[Cascade], path: Path, digest: str, point: OperatingPoint, options: dict[str, Any]
) -> Cascade:
    made = kind.load(path, operating_point=point, **options)
    if made.manifest.digest != digest:
        made.close()
        raise BundleError(f"{path}: another bundle than when the cascade was pickled. Restore it, or load it anew.")
    return made


def _check_batch_rows(rows: Any) -> None:
    if not isinstance(rows, int | np.integer) or isinstance(rows, bool) or rows < 1:
        raise InputError(f"batch_rows is {rows!r}, expected a whole number of at least 1.")


def _warn_of_dead_exits(point: OperatingPoint) -> None:
    """Say so when an exit is switched on but can't be reached: it only costs its head's time."""
    shares = point.expected.get("exit_shares", ())
    for j, threshold in enumerate(point.thresholds):
        if np.isfinite(threshold) and j < len(shares) and shares[j] == 0:
            warnings.warn(
                f"operating point {point.name!r}: exit {j} has the threshold {threshold:g}, which no row reached "
                "at calibration. Set it to +inf to switch the exit off.",
                stacklevel=3,
            )
