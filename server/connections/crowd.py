"""All connections of a server: how many there may be, who has to go, and what waits to be read."""

import asyncio
from collections.abc import Callable
from typing import Protocol

from offramp.server.memory import Memory
from offramp.server.settings import Settings

_SWEEP = 0.25  # seconds between two looks at what every client does


class Member(Protocol):
    """What a crowd asks of a connection."""

    @property
    def working(self) -> bool:
        """Whether a request is here whole, or is being answered."""

    @property
    def idle_since(self) -> float | None:
        """Since when (loop time) it waits for its client; None while it's the server's turn."""

    @property
    def unsent(self) -> int:
        """Bytes of answers that the client hasn't taken yet."""

    def look(self, now: float) -> None:
        """Let go of a client that is too slow."""

    def make_way(self) -> None:
        """Go at once: another needs the place."""

    def drain(self) -> None:
        """The server is stopping: what isn't here whole is refused."""


class Crowd:
    """The connections there are; on the event loop alone."""

    def __init__(self, settings: Settings, memory: Memory, most: int) -> None:
        """most: connections at a time; settings.max_connections, or what descriptors allow."""
        self.settings = settings
        self.most = most
        self.draining = False
        self.heard = 0.0  # loop time of the last sign of any client
        self._members: set[Member] = set()
        self._memory = memory
        self._unsent = 0
        memory.unsent = lambda: self._unsent

    @property
    def working(self) -> bool:
        """Whether any request is in work, or any answer on its way."""
        return any(member.working or member.unsent for member in self._members)

    def quiet_for(self, seconds: float, now: float) -> bool:
        """Whether no client has been heard of for a while."""
        return now - self.heard >= seconds

    def enter(self, member: Member) -> bool:
        """Take a connection in. False if there is no room: every other has a request in work."""
        if len(self._members) >= self.most and not self._make_room(lambda one: one.idle_since is not None):
            return False
        self._members.add(member)
        return True

    def leave(self, member: Member) -> None:
        self._members.discard(member)

    def count_unsent(self) -> None:
        """Answers have been written, or read. Above the limit clients that don't read have to go."""
        self._unsent = sum(member.unsent for member in self._members)
        while self._unsent > self._memory.limit and self._make_room(lambda one: one.unsent > 0):
            self._unsent = sum(member.unsent for member in self._members)

    def _make_room(self, among: Callable[[Member], bool]) -> bool:
        """Let go of the one that waits longest for its client. False if there is none."""
        waiting = [member for member in self._members if among(member) and member.idle_since is not None]
        if not waiting:
            return False
        longest = min(waiting, key=lambda member: member.idle_since or 0.0)
        self.leave(longest)
        longest.make_way()
        return True

    async def watch(self) -> None:
        """Look at every client from time to time, for ever. One timer for all costs less than one a request."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_SWEEP)
            now = loop.time()
            for member in list(self._members):
                member.look(now)
            self.count_unsent()

    def drain(self) -> None:
        """From now on every answer is its connection's last."""
        self.draining = True
        for member in list(self._members):
            member.drain()

    def scatter(self) -> None:
        """Let all go at once."""
        for member in list(self._members):
            member.make_way()
