"""How long a request is worked on: until its timeout passes, and no longer than somebody waits for it."""

import asyncio
import time
from types import TracebackType
from typing import Self

from offramp.server.errors import ClientGone, DeadlinePassed


class Patience:
    """One request's. Threads look at it between two pieces of work; on the event loop its `async with` cuts waiting."""

    def __init__(self, seconds: float) -> None:
        """seconds: from now."""
        self._began = time.monotonic()
        self._seconds = seconds
        self._gone = False
        self._timer: asyncio.Timeout | None = None

    @property
    def over(self) -> bool:
        """Whether nobody waits for the answer any more."""
        return self._gone or time.monotonic() >= self._began + self._seconds

    def check(self) -> None:
        """Raises DeadlinePassed or ClientGone if it is over."""
        if self._gone:
            raise ClientGone("nobody waits for the answer any more.")
        if self.over:
            raise self._passed()

    def allow(self, seconds: float) -> None:
        """Another timeout, from the same beginning."""
        self._seconds = seconds
        if self._timer is not None:
            self._timer.reschedule(asyncio.get_running_loop().time() + self._left())

    def _left(self) -> float:
        return self._began + self._seconds - time.monotonic()

    def _passed(self) -> DeadlinePassed:
        return DeadlinePassed(f"timeout: no answer within {self._seconds:g} s, given up.")

    async def __aenter__(self) -> Self:
        self._timer = asyncio.timeout(self._left())
        await self._timer.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._gone = True
        assert self._timer is not None
        try:
            await self._timer.__aexit__(kind, error, trace)
        except TimeoutError as late:
            raise self._passed() from late
