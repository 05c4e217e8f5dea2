"""The calls under way on one executor: what they use stays until the last has ended, whoever closes meanwhile."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from offramp.runtime.errors import CascadeClosed


class Calls:
    """Counts calls; after `close` none begins, and those that are under way finish."""

    def __init__(self, let_go: Callable[[], None]) -> None:
        """let_go: lets go of what calls use; called once none is under way and none may begin."""
        self._let_go = let_go
        self._lock = threading.Lock()
        self._under_way, self.closing = 0, False  # closing: read by whoever keeps what calls use
        self._process = os.getpid()

    @property
    def forked(self) -> bool:
        """Whether this is a forked child of the process that loaded: its copy of the lock may be taken for ever."""
        return self._process != os.getpid()

    def begin(self) -> None:
        """A call starts: what it uses stays until its `end`. Raises CascadeClosed."""
        if self.forked:
            raise self.refusal()
        with self._lock:
            if self.closing:
                raise self.refusal()
            self._under_way += 1

    def end(self) -> None:
        with self._lock:
            self._under_way -= 1
            if self.closing and not self._under_way:
                self._let_go()

    @contextmanager
    def held(self) -> Iterator[None]:
        """From `begin` to `end`."""
        self.begin()
        try:
            yield
        finally:
            self.end()

    def close(self) -> None:
        if self.forked:
            return
        with self._lock:
            self.closing = True
            if not self._under_way:
                self._let_go()

    def refusal(self) -> CascadeClosed:
        """The error that says why there are no calls any more."""
        if self.forked:
            return CascadeClosed(
                f"this cascade was loaded in process {self._process} and a forked process can use neither its threads "
                "nor its device: call Cascade.load in the process that predicts."
            )
        return CascadeClosed("this cascade is closed: load it again.")
