"""Bytes that requests and their answers hold, all together: what would be too many is refused before it is made."""

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

from offramp.server.errors import QueueFull, TooLarge

# So much every request has for itself: small ones get through while large ones fill the rest.
_FREE = 64 * 2**10


class Memory:
    """The bytes that requests may hold in all. Any thread may ask."""

    def __init__(self, limit: int, unsent: Callable[[], int] = lambda: 0) -> None:
        """unsent: bytes of answers that clients haven't taken yet, which count as well."""
        self.limit = limit
        self.unsent = unsent
        self._held = 0
        self._lock = threading.Lock()

    @property
    def held(self) -> int:
        """Bytes that requests hold now, without what each has for itself."""
        return self._held

    def move(self, before: int, after: int) -> None:
        """A request that held `before` bytes is to hold `after`. Raises QueueFull if there is no room for more."""
        if after > self.limit:
            raise TooLarge(
                f"the request takes {after} bytes of memory, this server has {self.limit} for all requests. "
                "Send fewer rows at a time."
            )
        before, after = max(0, before - _FREE), max(0, after - _FREE)
        with self._lock:
            held = self._held + after - before
            if after > before and held + self.unsent() > self.limit:
                raise QueueFull(
                    f"requests that are in work fill the {self.limit} bytes there are for them. Try again later.", 1.0
                )
            self._held = held


class Hold:
    """What one request holds; nothing any more behind its `with`."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._bytes = 0
        self._over = False
        self._lock = threading.Lock()

    def set(self, size: int) -> None:
        """The request now holds so many bytes in all. Raises QueueFull, or TooLarge if it never could."""
        if max(size, self._bytes) <= min(_FREE, self._memory.limit):
            self._bytes = size  # nobody counts that
            return
        with self._lock:
            if not self._over:  # a thread may still be at it when its request has ended
                self._memory.move(self._bytes, size)
                self._bytes = size

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.set(0)
        self._over = True
