"""One call of predict on a device: batches go from graph to graph, and only who leaves is told to the host.

After each exit one launch decides, lists the survivors and leaves both in a report; the report is copied behind it,
and while it travels the other batch in flight is worked on. State moves only where the batch falls to a smaller bucket:
then one launch gathers every carried tensor; until then rows that left ride along, flagged.
"""

import math
from collections import deque
from collections.abc import Callable, Generator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from offramp.kernels import gather
from offramp.kernels.compact import Report, compact_into
from offramp.kernels.device import on_triton
from offramp.kernels.exit_gate import exit_gate, gate_into
from offramp.kernels.reference import GateOutput, Survivors
from offramp.runtime.execution.answers import Answers
from offramp.runtime.execution.device.buckets import bucket
from offramp.runtime.execution.device.graphs import astray_error
from offramp.runtime.execution.device.lanes import IN_FLIGHT, Device, Lane
from offramp.runtime.execution.device.torch.program import Tensors
from offramp.runtime.execution.route import Route
from offramp.runtime.gate import Decision
from offramp.runtime.inputs import Arrays
from offramp.runtime.predictions import Predictions
from torch import Tensor

Ids = NDArray[np.int64]
_ENDED = object()
GONE = -1  # id of a row that only fills its batch up


class Flow:
    """One call: rows in, answers out. `Run`'s counterpart on a device."""

    def __init__(
        self,
        route: Route,
        device: Device,
        arrays: Arrays,
        sizes: Mapping[str, int],
        fetch: tuple[str, ...],
        batch_rows: int,
        *,
        warm: bool = False,
    ) -> None:
        """arrays, sizes: checked inputs. fetch: what to bring beside the answers. batch_rows: rows run at once.

        warm: prepare graphs for being used again and again.
        """
        manifest, rows = route.manifest, sizes["batch"]
        self._route, self._gate, self._device, self._arrays = route, route.gate, device, arrays
        self._rows, self._warm = rows, warm
        self._most = batch_rows if manifest.rows_independent else 1
        self._costs = route.costs(sizes)
        self._axes = {i.name: i.batch_axis for i in manifest.inputs} | {
            name: tensor.batch_axis for name, tensor in manifest.tensors.items()
        }
        routed = "routing" in fetch or route.needs_routing
        self._steps = route.steps(logits=True, routing=routed)
        self._answers = Answers(rows, len(manifest.classes) if "probabilities" in fetch else None)
        self._routing = np.full((len(manifest.routing), rows), np.nan, np.float32) if routed else None
        self._ran = [0] * len(self._steps)

    def answer(self, fetch: tuple[str, ...], again: Callable[[str], Any]) -> Predictions:
        """Run everything. again: how to get what wasn't fetched."""
        starts = deque(range(0, self._rows, self._most))
        if starts:
            with self._device.lanes(min(IN_FLIGHT, len(starts))) as lanes:
                self._take_turns(starts, lanes)
        kinds = {"probabilities": self._answers.probabilities, "routing": self._routing}
        return self._answers.predictions(self._costs, self._ran, {kind: kinds[kind] for kind in fetch}, again)

    def _take_turns(self, starts: "deque[int]", lanes: list[Lane]) -> None:
        """Each batch queues its work up to the next report and hands over; whoever waits, waits for that alone."""
        free, flying = list(lanes), deque[tuple[Lane, Generator[None, None, None]]]()
        while starts or flying:
            while free and starts:
                lane, start = free.pop(), starts.popleft()
                ids = np.arange(start, min(start + self._most, self._rows))
                flying.append((lane, self._batch(lane, ids)))
            lane, batch = flying.popleft()
            with lane.current():
                ended = next(batch, _ENDED) is _ENDED
            if ended:
                free.append(lane)
            else:
                flying.append((lane, batch))

    def _batch(self, lane: Lane, rows: Ids) -> Generator[None, None, None]:
        """One batch through the cascade; yields whenever it has queued all it can without hearing from the device."""
        size = bucket(len(rows), self._most)
        whole = len(rows) == self._rows
        state: Tensors = {
            i.name: lane.upload(
                i.name,
                self._arrays[i.name] if whole else _part(self._arrays[i.name], rows, i.batch_axis),
                size,
                i.batch_axis,
            )
            for i in self._route.manifest.inputs
        }
        ids = np.full(size, GONE)
        ids[: len(rows)] = rows
        live = lane.live(len(rows), size)
        for k, step in enumerate(self._steps):
            outputs = tuple(name for name in step.outputs if name not in (step.label, step.score))
            prepared = self._device.graphs.prepared(step.graph, state, outputs, lane.number, warm=self._warm)
            made = prepared.run(state)
            self._ran[k] += size
            state = {name: made[name] if name in made else state[name] for name in step.following}
            layers = {layer: _to_host(made[name]) for name, layer in step.layers}
            if step.exit is None:
                continue
            j, report = step.exit, lane.report(size)
            logits = made[step.logits or ""]
            on_device = self._temperature(j, logits.device)
            _decide(report, logits, self._gate.point.thresholds[j], live, on_device, prepared.astray)
            wants = self._gate.needs(j)
            brought = self._answers.probabilities is not None or ("logits" in wants and on_device is None)
            values = _to_host(logits) if brought else None
            report.send()
            yield
            told = report.arrived()
            if told["astray"][0]:
                raise astray_error(step.graph)
            stays = self._settle(j, step.seen, told, values, layers, ids, on_device is not None)
            count = int(np.count_nonzero(stays))
            if not count or k + 1 == len(self._steps):
                return
            if count == np.count_nonzero(ids != GONE):
                continue
            smaller = bucket(count, self._most)
            if smaller < size:
                state = self._move(lane, k + 1, state, report.survivors[:count], smaller)
                ids = np.concatenate([ids[stays], np.full(smaller - count, GONE)])
                live, size = lane.live(count, smaller), smaller
            else:
                ids = np.where(stays, ids, GONE)
                live = ~report.leave if live is None else live & ~report.leave

    def _temperature(self, j: int, place: torch.device) -> Any | None:
        """The inverse temperature (one, or (C,) on the device) of a calibrator that does nothing else, or None.

        A second launch does it over logits that are still in cache. All other calibrators are numpy's: they work on
        the few rows that leave, whose numbers are on the host by then.
        """
        calibrator, classes = self._gate.calibrators[j], len(self._route.manifest.classes)
        if not calibrator.preserves_argmax or "logits" not in calibrator.needs:
            return None
        inputs = calibrator.graph_inputs(classes)
        if inputs is None or (np.asarray(inputs["scale"]) != 1).any() or (np.asarray(inputs["bias"]) != 0).any():
            return None
        inverse = np.asarray(inputs["inv_temperature"], np.float32)
        return float(inverse[0]) if (inverse == inverse[0]).all() else self._device.constant(inverse, place)

    def _move(self, lane: Lane, k: int, state: Tensors, survivors: Tensor, rows: int) -> Tensors:
        """The survivors' state in front of stage k, gathered to where its graph reads it."""
        step = self._steps[k]
        names = list(state)
        axes = [self._axes[name] for name in names]
        shapes = {
            name: (*state[name].shape[:axis], rows, *state[name].shape[axis + 1 :])
            for name, axis in zip(names, axes, strict=True)
        }
        outputs = tuple(name for name in step.outputs if name not in (step.label, step.score))
        there = self._device.graphs.landing(step.graph, shapes, outputs, lane.number) or {}
        sources = [state[name].contiguous() for name in names]
        out = [
            there[name] if name in there else source.new_empty(shapes[name])
            for name, source in zip(names, sources, strict=True)
        ]
        # A tensor that is read where another is written to must be moved before: they never share a bucket.
        gather(sources, survivors, axes, rows, out)
        return dict(zip(names, out, strict=True))

    def _settle(
        self,
        j: int,
        seen: int,
        told: Mapping[str, NDArray[Any]],
        values: Tensor | None,
        layers: Mapping[int, Tensor],
        ids: Ids,
        has_odds: bool,
    ) -> NDArray[np.bool_]:
        """Write down the answers of the rows that leave; returns which of the batch go on."""
        real = ids != GONE
        for layer, column in layers.items():
            assert self._routing is not None
            self._routing[layer, ids[real]] = column.numpy()[real]
        stays = np.zeros(len(ids), np.bool_)
        if self._gate.point.thresholds[j] != -math.inf:  # there everybody leaves, rows without a score too
            stays[told["survivors"][: told["count"][0]]] = True
        leaves = real & ~stays
        rows, score, label = ids[leaves], told["score"][leaves], told["label"][leaves].astype(np.int64)
        if not len(rows):
            return stays
        everyone, aux = np.ones(len(rows), np.bool_), self._aux(j, seen, told, values, rows, leaves)
        if has_odds:
            decision = Decision(everyone, None, told["odds"][leaves], self._gate.point.abstain_below)
        else:
            decision = self._gate.decide(j, label, score, aux)
        self._answers.keep(j, decision, everyone, rows, label, score)
        if self._answers.probabilities is not None:
            self._answers.keep_probabilities(rows, everyone, self._gate.calibrators[j], aux)
        return stays

    def _aux(
        self, j: int, seen: int, told: Mapping[str, Any], values: Tensor | None, rows: Ids, leaves: NDArray[np.bool_]
    ) -> dict[str, Any]:
        needs, aux = self._gate.needs(j), dict[str, Any]()
        if values is not None:
            aux["logits"] = values.numpy()[leaves]
        if "entropy" in needs and values is None:
            aux["entropy"] = -told["entropy"][leaves].astype(np.float64)
        if self._routing is not None and "routing" in needs:
            aux["routing"] = self._routing[:seen, rows]
        return aux


def _part(array: NDArray[Any], rows: Ids, axis: int) -> NDArray[Any]:
    return array[(slice(None),) * axis + (slice(int(rows[0]), int(rows[-1]) + 1),)]


def _to_host(tensor: Tensor) -> Tensor:
    """A copy on its way to the host, there once an event behind it has come."""
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def _decide(
    report: Report, logits: Tensor, threshold: float, live: Tensor | None, inverse: Any | None, astray: Tensor | None
) -> None:
    """Label, score, who leaves and who stays into the report, in one launch; two with a temperature."""
    out = GateOutput(report.label, report.odds, report.score, report.entropy, None, report.leave)
    survivors = Survivors(report.survivors, report.count)
    if on_triton(logits):
        gate_into(out, logits, threshold=threshold, live=live, survivors=survivors)
    else:
        _fill(out, exit_gate(logits, threshold=threshold, live=live))
        compact_into(survivors, report.leave, live)
    if inverse is not None:
        calibrated = exit_gate(logits, inv_temperature=inverse)
        report.odds.copy_(calibrated.score)
    report.astray.zero_() if astray is None else report.astray.copy_(astray.reshape(1))


def _fill(out: GateOutput, values: GateOutput) -> None:
    for target, source in zip(out, values, strict=True):
        if target is not None:
            target.copy_(source)
