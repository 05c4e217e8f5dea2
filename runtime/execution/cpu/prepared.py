"""A call that one graph answers, got ready in advance: what lies between the caller and ONNX Runtime is short.

A row that comes every 20 ms meets cold caches, and Python, which a hot loop hardly notices, then costs half as much
as a small network. So nothing is looked up or made here that could have been before, and answers are made out when
somebody looks at them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from offramp.runtime.execution.call import AgainOf, Keep, go_on
from offramp.runtime.execution.cpu.one_graph import Looked, LookedAlone, said_of
from offramp.runtime.execution.cpu.session import RunSession
from offramp.runtime.execution.route import Route
from offramp.runtime.inputs import counts
from offramp.runtime.predictions import Predictions


class Prepared:
    """Answers inputs that need no conversion; whatever is unusual is left to the general way."""

    def __init__(
        self,
        route: Route,
        sessions: Mapping[str, RunSession],
        file: str,
        outputs: list[str],
        constants: Mapping[str, NDArray[Any]],
        *,
        takes: Sequence[str],
        limit: int,
        again: AgainOf,
        keep: Keep | None,
    ) -> None:
        """sessions: those that are open, the graph's `file` among them or not. outputs: to fetch.

        takes: the model's inputs that the graph takes. constants: what beside them. limit: the most rows at once.
        again: how to get what isn't fetched, of which inputs. keep: see `Executor.prepare`; the outputs end in what
        `said_of` takes then.
        """
        self._route, self._sessions, self._file, self._outputs = route, sessions, file, outputs
        self._constants = dict(constants)
        self._limit = limit if route.manifest.rows_independent else 1
        self._again, self._keep = again, keep
        manifest = route.manifest
        self._expected = [
            (i.name, dtype, tuple(i.shape), dtype.kind == "f", counts(i, manifest), i.name in takes)
            for i, dtype in ((i, np.dtype(i.dtype)) for i in manifest.inputs)
        ]

    def __call__(self, inputs: Mapping[str, Any], stop: Callable[[], bool] | None = None) -> Predictions | None:
        """None: not for here, be it that something has to be converted, split up or refused.

        stop: whether nobody wants the answer any more. Raises Stopped if so.
        """
        run = self._sessions.get(self._file)
        if run is None or type(inputs) is not dict or len(inputs) != len(self._expected):
            return None
        feed, sizes = self._constants.copy(), dict[str, int]()
        for name, dtype, shape, is_float, counted, taken in self._expected:
            array = inputs.get(name)
            # ONNX Runtime copies what isn't contiguous by itself.
            if type(array) is not np.ndarray or array.dtype is not dtype:
                return None
            there = array.shape
            if there != shape:
                if len(there) != len(shape):
                    return None
                for size, wanted in zip(there, shape):  # noqa: B905 - an argument by name costs as much as the loop
                    if size != wanted and (isinstance(wanted, int) or sizes.setdefault(wanted, size) != size):
                        return None
            if is_float and (not array.size or not all_finite(array)):
                return None
            if counted and array.size and array.item(array.argmin()) < 0:
                return None
            if taken:
                feed[name] = array
        if not 0 < sizes["batch"] <= self._limit or (len(sizes) > 1 and 0 in sizes.values()):
            return None
        if stop is not None:
            go_on(stop)
        try:
            made: Sequence[Any] = run(self._outputs, feed)
        except Exception:  # the general way says what is wrong
            return None
        rows = sizes["batch"]
        looked = LookedAlone if rows == 1 else Looked
        if self._keep is None:
            return Predictions.later(looked(self._route, sizes, made, inputs, self._again))
        made, seen = said_of(self._route, made)
        return self._keep(Predictions.later(looked(self._route, sizes, made, inputs, self._again)), seen, inputs)


def all_finite(array: NDArray[Any]) -> bool:
    """Whether all numbers are finite. numpy takes NaN for the largest and the smallest, and these two methods find
    their place without the machinery of its universal functions, which take 50 us in cold caches."""
    return math.isfinite(array.item(array.argmax())) and math.isfinite(array.item(array.argmin()))
