"""A cascade whose state stays on a device."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from offramp.runtime.bundle import Block, Segment, read_bundle
from offramp.runtime.calibration_file import read_calibration
from offramp.runtime.cascade import FETCHABLE, Cascade
from offramp.runtime.errors import InputError
from offramp.runtime.execution.device.buckets import buckets
from offramp.runtime.execution.device.flow import Flow
from offramp.runtime.execution.device.graphs import astray_error
from offramp.runtime.execution.device.lanes import IN_FLIGHT, Device, open_device
from offramp.runtime.inputs import check_inputs
from offramp.runtime.points import OperatingPoint
from offramp.runtime.predictions import Predictions

BATCH_ROWS = 1024


class DeviceCascade(Cascade):
    """As `Cascade`, on a GPU, or through the same code on CPU. Any number of threads may use it at once.

    `predict` keeps everything on the device; `record` and `run_graph` hand arrays in and out of it, block by block.
    """

    _sessions: Any  # a Device

    @property
    def device(self) -> Device:
        found: Device = self._sessions
        return found

    def _one_graph(self) -> None:
        """None: control flow inside a graph runs on the host, so blocks are graphs of their own here."""
        return

    def predict(
        self, inputs: Mapping[str, Any], *, fetch: Iterable[str] = (), allow_nonfinite: bool = False
    ) -> Predictions:
        wanted = (fetch,) if isinstance(fetch, str) else tuple(fetch)
        for kind in wanted:
            if kind not in FETCHABLE:
                raise InputError(f"fetch has {kind!r}, expected any of {FETCHABLE}.")
        arrays, sizes = check_inputs(inputs, self.manifest, allow_nonfinite=allow_nonfinite)
        flow = Flow(self._route, self.device, arrays, sizes, wanted, self._batch_rows)
        return flow.answer(
            wanted, lambda kind: self.predict(inputs, fetch=(kind,), allow_nonfinite=allow_nonfinite)._get(kind)
        )

    def warm_up(self, sizes: Mapping[str, int] | None = None) -> None:
        """Run every graph at every bucket, on both lanes, so that nothing is planned or captured while serving.

        sizes: the symbolic axes beside the batch, for instance {"seq": 32}; call it once for each length that will
        come often. Other sizes run as well; they are captured once they have come three times.
        """
        axes = {axis: int((sizes or {}).get(axis, 16)) for axis in self.manifest.axes[1:]}
        most = self._batch_rows if self.manifest.rows_independent else 1
        quiet = OperatingPoint(
            tuple(t if t == np.inf or t == -np.inf else 1e38 for t in self.operating_point.thresholds), name="warm-up"
        )
        at = self if quiet.thresholds == self.operating_point.thresholds else self.at(quiet)
        for size in reversed(buckets(most)):
            lengths = {"batch": IN_FLIGHT * size, **axes}  # a batch on each lane
            arrays = {
                i.name: np.ones([lengths[d] if isinstance(d, str) else d for d in i.shape]).astype(i.dtype)
                for i in self.manifest.inputs
            }
            Flow(at._route, self.device, arrays, lengths, (), size, warm=True).answer((), str)

    def _values(self, graph: Block | Segment, state: Mapping[str, Any], outputs: list[str]) -> list[Any]:
        with self.device.lanes(1) as (lane,), lane.current():
            feed = {name: torch.from_numpy(np.ascontiguousarray(state[name])).to(lane.device) for name in graph.inputs}
            gate = {name: torch.from_numpy(value).to(lane.device) for name, value in self._gate_inputs.items()}
            made, astray = self.device.graphs.once(graph, feed, gate, tuple(outputs), lane.number)
            flag = None if astray is None else torch.empty((), dtype=torch.bool, pin_memory=lane.stream is not None)
            if flag is not None and astray is not None:
                flag.copy_(astray, non_blocking=True)
            values = [torch.empty(v.shape, dtype=v.dtype, pin_memory=lane.stream is not None) for v in made.values()]
            for host, value in zip(values, made.values(), strict=True):
                host.copy_(value, non_blocking=True)
            if lane.stream is not None:
                event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record()
                event.synchronize()
        if flag is not None and bool(flag.numpy()):
            raise astray_error(graph)
        return [value.numpy() for value in values]


def load_on_device(
    path: str | Path,
    device: str,
    operating_point: str | OperatingPoint,
    providers: Sequence[Any] | None,
    batch_rows: int | None,
) -> DeviceCascade:
    """`Cascade.load` for devices other than ONNX Runtime's CPU; the same checks and errors."""
    bundle = read_bundle(path)
    calibration = read_calibration(bundle.path, bundle.manifest)
    point = operating_point if isinstance(operating_point, OperatingPoint) else calibration.point(operating_point)
    opened = open_device(bundle, device, providers)
    cascade = DeviceCascade(bundle, calibration, point, opened, batch_rows or BATCH_ROWS)  # type: ignore[arg-type]
    for stage in cascade._route.stages:
        opened.graphs.open(stage.graph)
    return cascade
