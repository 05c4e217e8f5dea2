"""What a cascade needs of whatever runs its rows, and which of the two a device gets."""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from importlib.util import find_spec
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from offramp.runtime.bundle import Block, Bundle, Segment
from offramp.runtime.errors import InputError, RuntimeUnavailable
from offramp.runtime.execution.call import Again, AgainOf, Call, Keep
from offramp.runtime.execution.cpu.executor import CpuExecutor
from offramp.runtime.execution.cpu.session import available_threads, check_spin, check_threads, resolve_providers
from offramp.runtime.execution.route import Route
from offramp.runtime.inputs import Arrays
from offramp.runtime.predictions import Predictions

DEVICES = "cpu, cuda, cuda:N, torch:cpu, torch:cuda or torch:cuda:N"

State = Mapping[str, Any]
"""Tensors by name, where the executor keeps them: arrays on a CPU, tensors on a device."""

ShortWay = Callable[[Mapping[str, Any], Callable[[], bool] | None], Predictions | None]
"""Unchecked inputs, and whether to stop, to answers that fetch nothing more.

None for inputs that it doesn't take, which then go the general way."""


class Executor(Protocol):
    """Runs a bundle's graphs. Any number of threads may use it at once; every cascade of a bundle shares one.

    `answer` takes a call from its first block to its last answer. Who gathers the rows of several calls in front of
    a block himself puts, runs, gathers and fetches instead, asks each call's gate in between, and keeps it `held`.
    """

    batch_rows: int
    """The most rows a block runs at once, unless the user says otherwise."""

    @property
    def fingerprint(self) -> str:
        """What decides the last bits of an answer beside the bundle: the library, where it runs, its threads."""

    @property
    def opened(self) -> frozenset[str]:
        """Files of the graphs that are open."""

    @property
    def runs_cascade_graph(self) -> bool:
        """Whether calls may go through the bundle's cascade graph here."""

    @property
    def gives_every_exit(self) -> bool:
        """Whether that graph can say what every exit said."""

    def open(self, route: Route, *, every_exit: bool = False) -> None:
        """Open what a route runs. Raises BundleError, so that what is wrong is said before anything runs.

        every_exit: for calls that keep what every exit says.
        """

    def answer(self, call: Call, again: Again) -> Predictions:
        """Answer all rows of a call. again: how to get what it doesn't fetch.

        It keeps what every exit says, if the call asks for that and it `fills` it. Raises InputError for values that a
        graph can't run on, CascadeClosed.
        """

    def fills(self, call: Call) -> bool:
        """Whether `answer` keeps what every exit says, if the call asks for that; else each has to be looked at."""

    def prepare(self, route: Route, limit: int, again: AgainOf, keep: Keep | None = None) -> ShortWay | None:
        """The short way for a route that one graph answers. limit: the most rows at once.

        again: how to get what it doesn't fetch, of which inputs. keep: what to do with all answers and what every exit
        said of them, right after the run. None where there is no such way.
        """

    def held(self) -> AbstractContextManager[None]:
        """Within, graphs stay and can be run, whoever closes. Raises CascadeClosed if somebody did before."""

    def put(self, arrays: Mapping[str, NDArray[Any]]) -> State:
        """Inputs as state in front of the first block."""

    def run(self, graph: Block | Segment, state: State, outputs: Sequence[str]) -> dict[str, Any]:
        """Run one block or segment, its exit's gate included, on the state in front of it: the outputs asked for.

        Raises InputError for values the graph can't run on, CascadeClosed.
        """

    def gather(self, parts: Sequence[tuple[State, NDArray[np.int64]]], axes: Mapping[str, int]) -> State:
        """Rows of several batches as one batch, part after part.

        parts: at least one state, with the positions of the rows to take from it. axes: {tensor: batch axis}.
        """

    def fetch(self, state: State) -> Arrays:
        """Tensors as arrays of this process."""

    def run_cascade_graph(
        self, inputs: Mapping[str, NDArray[Any]], thresholds: Mapping[str, NDArray[Any]], *, every_exit: bool = False
    ) -> list[NDArray[Any]]:
        """Run the cascade graph on checked inputs: its CASCADE_OUTPUTS.

        thresholds: as `threshold_inputs` or `threshold_rows` makes them. every_exit: EVERY_EXIT_OUTPUTS as well, which
        `Reached` tells apart. Raises InputError where it can't be run.
        """

    def warm_up(self, route: Route, sizes: Mapping[str, int], rows: int, *, every_exit: bool = False) -> None:
        """Run a route on made-up rows, so that nothing is done for the first time while serving.

        sizes: of every symbolic axis but the batch. rows: the largest batch to come. every_exit: as in `open`.
        """

    def close(self) -> None:
        """Let go of graphs and memory. Calls that are under way finish; later ones raise CascadeClosed."""


def open_executor(
    bundle: Bundle, device: str, *, threads: int | None = None, providers: Sequence[Any] | None = None, spin_us: int = 0
) -> Executor:
    """The executor for a device: see `Cascade.load`. Raises InputError, RuntimeUnavailable with what is missing."""
    if threads is not None:
        check_threads(threads)
    check_spin(spin_us)
    if not isinstance(device, str) or not re.fullmatch(r"cpu|(torch:)?cuda(:\d+)?|torch:cpu", device):
        raise InputError(f"device is {device!r}, expected {DEVICES}.")
    has_torch = find_spec("torch") is not None
    if device.startswith("torch:") and not has_torch:
        raise RuntimeUnavailable(f"device is {device!r}, but torch isn't installed. Install your build of it first.")
    if device != "cpu" and has_torch:
        from offramp.runtime.execution.device.executor import open_device  # imports torch, which most machines lack

        return open_device(bundle, device, providers)
    given = resolve_providers(device, providers)
    return CpuExecutor(bundle, threads=threads or available_threads(), providers=given, spin_us=spin_us)
