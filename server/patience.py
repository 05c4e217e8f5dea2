"""How long a request is worked on: until its timeout passes, and no longer than somebody waits for it."""

import asyncio
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

from offramp.server.errors import ClientGone, DeadlinePassed

if TYPE_CHECKING:  # processes that decode bodies load no web framework
    from starlette.requests import Request

LATE = "timeout: no answer within {:g} s, given up."
_UNHEARD = 0.02  # seconds in which nobody listens whether the client is still there
_LONGEST = 86_400.0  # seconds until a timer looks again


class Patience:
    """One request's. Threads look at it between two pieces of work; on the event loop `Attended` cuts waiting short."""

    def __init__(self, seconds: float, late: str = LATE) -> None:
        """seconds: from now. late: what is said when they are over."""
        self._began = time.monotonic()
        self._seconds, self._late = seconds, late
        self._gone = False

    @property
    def over(self) -> bool:
        """Whether nobody waits for the answer any more."""
        return self._gone or time.monotonic() >= self._began + self._seconds

    @property
    def left(self) -> float:
        """Seconds."""
        return self._began + self._seconds - time.monotonic()

    def check(self) -> None:
        """Raises DeadlinePassed or ClientGone if it is over."""
        if self._gone:
            raise ClientGone("nobody waits for the answer any more.")
        if self.over:
            raise self.passed()

    def passed(self) -> DeadlinePassed:
        return DeadlinePassed(self._late.format(self._seconds))

    def allow(self, seconds: float) -> None:
        """Another timeout, from the same beginning."""
        self._seconds = seconds

    def end(self) -> None:
        """Nobody waits any more."""
        self._gone = True


class Attended:
    """While this is entered, its task is cancelled once a request's patience is over or its client has hung up.

    Raises DeadlinePassed or ClientGone in place of that cancellation. It listens to the client from a moment on that
    most requests don't last: for them a timer that never comes is all there is.
    """

    def __init__(self, request: "Request", patience: Patience) -> None:
        self.patience = patience
        self._request = request
        self._reading, self._looked = True, False
        self._hearing: asyncio.Task[None] | None = None
        self._error: DeadlinePassed | ClientGone | None = None

    def __enter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None
        self._task, self._cancelling = task, task.cancelling()
        self._loop = task.get_loop()
        self._timer = self._loop.call_later(min(_UNHEARD, self.patience.left), self._look)
        return self

    def work(self, patience: Patience) -> None:
        """The body has been read, and from now on there is this patience."""
        self.patience, self._reading = patience, False
        if self._looked:
            self._look_in(_UNHEARD)

    def allow(self, seconds: float) -> None:
        """Another timeout, from the same beginning."""
        self.patience.allow(seconds)
        if self._looked or seconds < _UNHEARD:
            # Where nobody listens yet, because the body took its time, that mustn't be put off.
            self._look_in(self.patience.left if self._hearing is not None else _UNHEARD)

    def _look_in(self, seconds: float) -> None:
        self._timer.cancel()
        self._timer = self._loop.call_later(min(seconds, self.patience.left, _LONGEST), self._look)

    def _look(self) -> None:
        self._looked, left = True, self.patience.left
        if left <= 0:
            self._stop(self.patience.passed())
            return
        if not self._reading and self._hearing is None:
            self._hearing = self._loop.create_task(self._hear())
        self._look_in(left)

    async def _hear(self) -> None:
        while (await self._request.receive())["type"] != "http.disconnect":
            pass
        self._stop(ClientGone("the client hung up."))

    def _stop(self, error: DeadlinePassed | ClientGone) -> None:
        self._error = self._error or error
        self._task.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        if self._hearing is not None:
            self._hearing.cancel()
        self.patience.end()
        if self._error is not None and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise self._error from error
