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
from numpy.typing import NDArray
from offramp.kernels import gather
from offramp.kernels.compact import Report, compact_into
from offramp.kernels.device import on_triton
from offramp.kernels.exit_gate import exit_gate, gate_into
from offramp.kernels.reference import GateOutput, Survivors
from offramp.runtime.execution.answers import Ids
from offramp.runtime.execution.call import Again, Call
from offramp.runtime.execution.device.buckets import bucket
from offramp.runtime.execution.device.graphs import Graphs, Tensors
from offramp.runtime.execution.device.lanes import IN_FLIGHT, Lane, Lanes, to_host
from offramp.runtime.execution.values import OUT_OF_RANGE, cannot_run
from offramp.runtime.gate import Decision
from offramp.runtime.predictions import Predictions
from torch import Tensor

_ENDED = object()
GONE = -1  # id of a row that only fills its batch up


class Flow:
    """One call: rows in, answers out. `Blocks`' counterpart on a device."""

    def __init__(
        self, call: Call, graphs: Graphs, lanes: Lanes, constant: Callable[[Any], Tensor], *, warm: bool = False
    ) -> None:
        """constant: puts numbers that stay the same on the device. warm: prepare graphs for being used again."""
        manifest = call.route.manifest
        self._call, self._graphs, self._lanes, self._constant, self._warm = call, graphs, lanes, constant, warm
        self._axes = {i.name: i.batch_axis for i in manifest.inputs} | {
            name: tensor.batch_axis for name, tensor in manifest.tensors.items()
        }
        self._steps = call.steps(logits=True)

    def answer(self, again: Again) -> Predictions:
        """Run everything. again: how to get what wasn't fetched."""
        starts = deque(range(0, self._call.rows, self._call.limit))
        if starts:
            with self._lanes.taken(min(IN_FLIGHT, len(starts))) as lanes:
                self._take_turns(starts, lanes)
        return self._call.predictions(again)

    def _take_turns(self, starts: "deque[int]", lanes: list[Lane]) -> None:
        """Each batch queues its work up to the next report and hands over; whoever waits, waits for that alone."""
        free, flying = list(lanes), deque[tuple[Lane, Generator[None, None, None]]]()
        while starts or flying:
            self._call.go_on()
            while free and starts:
                lane, start = free.pop(), starts.popleft()
                ids = np.arange(start, min(start + self._call.limit, self._call.rows))
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
        size, arrays = bucket(len(rows), self._call.limit), self._call.take(rows)
        state: Tensors = {
            i.name: lane.upload(i.name, arrays[i.name], size, i.batch_axis) for i in self._call.route.manifest.inputs
        }
        ids = np.full(size, GONE)
        ids[: len(rows)] = rows
        live = lane.live(len(rows), size)
        for k, step in enumerate(self._steps):
            outputs = tuple(name for name in step.outputs if name not in (step.label, step.score))
            prepared = self._graphs.prepared(step.graph, state, outputs, lane.number, warm=self._warm)
            made = prepared.run(state)
            self._call.ran[k] += size
            state = {name: made[name] if name in made else state[name] for name in step.following}
            layers = {layer: to_host(made[name]) for name, layer in step.layers}
            if step.exit is None:
                continue
            j, report = step.exit, lane.report(size)
            logits = made[step.logits or ""]
            on_device = self._temperature(j)
            _decide(report, logits, self._call.gate.point.thresholds[j], live, on_device, prepared.out_of_range)
            wants = self._call.gate.needs(j)
            brought = self._call.answers.probabilities is not None or ("logits" in wants and on_device is None)
            values = to_host(logits) if brought else None
            report.send()
            yield
            told = report.arrived()
            if told["out_of_range"][0]:
                raise cannot_run(step.graph.file, OUT_OF_RANGE)
            stays = self._settle(j, step.seen, told, values, layers, ids, on_device is not None)
            count = int(np.count_nonzero(stays))
            if not count or k + 1 == len(self._steps):
                return
            if count == np.count_nonzero(ids != GONE):
                continue
            smaller = bucket(count, self._call.limit)
            if smaller < size:
                state = self._move(lane, k + 1, state, report.survivors[:count], smaller)
                ids = np.concatenate([ids[stays], np.full(smaller - count, GONE)])
                live, size = lane.live(count, smaller), smaller
            else:
                ids = np.where(stays, ids, GONE)
                live = ~report.leave if live is None else live & ~report.leave

    def _temperature(self, j: int) -> Any | None:
        """The inverse temperature (one, or (C,) on the device) of a calibrator that does nothing else, or None.

        A second launch does it over logits that are still in cache. All other calibrators are numpy's: they work on
        the few rows that leave, whose numbers are on the host by then.
        """
        calibrator, classes = self._call.gate.calibrators[j], len(self._call.route.manifest.classes)
        if not calibrator.preserves_argmax or "logits" not in calibrator.needs:
            return None
        inputs = calibrator.graph_inputs(classes)
        if inputs is None or (np.asarray(inputs["scale"]) != 1).any() or (np.asarray(inputs["bias"]) != 0).any():
            return None
        inverse = np.asarray(inputs["inv_temperature"], np.float32)
        return float(inverse[0]) if (inverse == inverse[0]).all() else self._constant(inverse)

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
        there = self._graphs.landing(step.graph, shapes, outputs, lane.number) or {}
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
            assert self._call.routing is not None
            self._call.routing[layer, ids[real]] = column.numpy()[real]
        stays = np.zeros(len(ids), np.bool_)
        if self._call.gate.point.thresholds[j] != -math.inf:  # there everybody leaves, rows without a score too
            stays[told["survivors"][: told["count"][0]]] = True
        leaves = real & ~stays
        rows, score, label = ids[leaves], told["score"][leaves], told["label"][leaves].astype(np.int64)
        if not len(rows):
            return stays
        everyone, aux = np.ones(len(rows), np.bool_), self._aux(j, seen, told, values, rows, leaves)
        if has_odds:
            decision = Decision(everyone, told["odds"][leaves], self._call.gate.point.abstain_below)
        else:
            decision = self._call.gate.decide(j, label, score, aux)
        self._call.answers.keep(j, decision, everyone, rows, label, score)
        if self._call.answers.probabilities is not None:
            self._call.answers.keep_probabilities(rows, everyone, self._call.gate.calibrators[j], aux)
        return stays

    def _aux(
        self, j: int, seen: int, told: Mapping[str, Any], values: Tensor | None, rows: Ids, leaves: NDArray[np.bool_]
    ) -> dict[str, Any]:
        aux = self._call.aux(j, seen, None if values is None else values.numpy()[leaves], rows)
        if "entropy" in self._call.gate.needs(j) and values is None:
            aux["entropy"] = -told["entropy"][leaves].astype(np.float64)
        return aux


def _decide(
    report: Report, logits: Tensor, threshold: float, live: Tensor | None, inverse: Any | None, outside: Tensor | None
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
    report.out_of_range.zero_() if outside is None else report.out_of_range.copy_(outside.reshape(1))


def _fill(out: GateOutput, values: GateOutput) -> None:
    for target, source in zip(out, values, strict=True):
        if target is not None:
            target.copy_(source)
