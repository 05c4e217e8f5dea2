"""One call of predict under way: what it asks, and what is known of its rows so far.

How a call begins and ends is the same wherever its rows run; an executor does what lies between.
"""

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from offramp.runtime.errors import Stopped
from offramp.runtime.execution.answers import Answers, Ids
from offramp.runtime.execution.route import Costs, Route, Step
from offramp.runtime.inputs import Arrays, rows_of
from offramp.runtime.predictions import Predictions, Said, Seen

Again = Callable[[str], Predictions]
"""The same call once more, fetching what it didn't: "probabilities" or "routing"."""

AgainOf = Callable[[Mapping[str, Any], str], Predictions]
"""As `Again`, of which inputs."""

Keep = Callable[[Predictions, Said, Mapping[str, Any]], Predictions]
"""Keeps answers with what every exit said of them and their inputs, and gives them as their caller gets them."""


def not_again(kind: str) -> Predictions:
    """For a call whose answers nobody looks at."""
    raise AssertionError(f"{kind} of rows that were made up")


def go_on(stop: Callable[[], bool] | None) -> None:
    """Raises Stopped if nobody wants the answer any more."""
    if stop is not None and stop():
        raise Stopped("stopped before its answer, as its caller said.")


class Call:
    """Checked inputs on their way along a route."""

    def __init__(
        self,
        route: Route,
        arrays: Arrays,
        sizes: Mapping[str, int],
        fetch: tuple[str, ...] = (),
        *,
        limit: int,
        stop: Callable[[], bool] | None = None,
        seen: Seen | None = None,
    ) -> None:
        """sizes: of every symbolic axis. fetch: what to bring beside the answers. limit: the most rows run at once.

        stop: whether nobody wants the answer any more. seen: where to keep what every exit says; an executor that
        doesn't `fill` it leaves each to be looked at (see `anytime`).
        """
        self._stop, self.seen = stop, seen
        self.route, self.gate = route, route.gate
        self.arrays, self.sizes, self.fetch = arrays, sizes, fetch
        self.rows = sizes["batch"]
        self.limit = limit if route.manifest.rows_independent else 1
        self.routed = route.needs_routing or "routing" in fetch
        self.ran = [0] * len(route.stages)  # rows through each stage, those that rode along included

    # What follows is made when it's first asked for: a lone row through the cascade graph needs none of it.

    @cached_property
    def costs(self) -> Costs:
        return self.route.costs(self.sizes)

    @cached_property
    def answers(self) -> Answers:
        return Answers(self.rows, len(self.route.manifest.classes) if "probabilities" in self.fetch else None)

    @cached_property
    def routing(self) -> NDArray[np.float32] | None:
        """(L, N) routing entropies, NaN where a row didn't get; None if neither caller nor gate wants them."""
        layers = len(self.route.manifest.routing)
        return np.full((layers, self.rows), np.nan, np.float32) if self.routed else None

    def go_on(self) -> None:
        """Raises Stopped if nobody wants the answer any more. Whoever runs graphs asks in front of each."""
        go_on(self._stop)

    @cached_property
    def times(self) -> NDArray[np.float64]:
        """(J,) seconds from the start until all rows that came to an exit had its answer, NaN where none is known."""
        return np.full(len(self.route.manifest.exits), np.nan)

    def steps(self, *, logits: bool = False) -> list[Step]:
        """The route's stages with what is to be fetched of each. logits: at every exit, whoever asks for them."""
        wanted = logits or "probabilities" in self.fetch or self.seen is not None
        return self.route.steps(logits=wanted, routing=self.routed)

    def take(self, ids: Ids) -> Arrays:
        """The inputs of consecutive rows."""
        if len(ids) == self.rows:
            return self.arrays
        return rows_of(self.arrays, self.route.manifest, int(ids[0]), int(ids[-1]) + 1)

    def aux(self, exit: int, seen: int, logits: NDArray[Any] | None, ids: Ids) -> dict[str, Any]:
        """What an exit's calibrator may need of the rows `ids`. seen: layers run by this exit."""
        made: dict[str, Any] = {} if logits is None else {"logits": logits}
        if self.routing is not None and "routing" in self.gate.needs(exit):
            made["routing"] = self.routing[:seen, ids]
        return made

    def predictions(self, again: Again, *, so_far: bool = False) -> Predictions:
        """The answers, once every row has left. so_far: those that there are by now, which later ones don't change."""
        answers = self.answers.copy() if so_far else self.answers
        answers.flops = self.costs.exits[answers.exit]
        return answers.predictions(
            self.costs.executed(self.ran),
            {kind: getattr(self.answers if kind == "probabilities" else self, kind) for kind in self.fetch},
            again,
            self.route.manifest.classes,
        )
