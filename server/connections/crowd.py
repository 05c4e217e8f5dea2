"""All connections of a server: how many there may be, who has to go, and what waits to be read."""

import asyncio
import logging
from collections import OrderedDict
from typing import Protocol

from offramp.server.memory import Memory
from offramp.server.settings import Settings

_log = logging.getLogger("uvicorn.error.offramp")
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

    def cut_off(self) -> None:
        """Go at once, whatever is on its way."""

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
        self._members: OrderedDict[Member, None] = OrderedDict()  # who has been silent for longest comes first
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
        if len(self._members) >= self.most:
            idle = next((one for one in self._members if one.idle_since is not None), None)
            if idle is None:
                return False
            self._let_go(idle)
        self._members[member] = None
        return True

    def leave(self, member: Member) -> None:
        self._members.pop(member, None)

    def hear(self, member: Member, now: float) -> None:
        """A client has sent something."""
        self.heard = now
        if member in self._members:
            self._members.move_to_end(member)

    def count_unsent(self) -> None:
        """Answers have been written, or read. Above the limit clients that don't read have to go."""
        self._unsent = sum(member.unsent for member in self._members)
        while self._unsent > self._memory.limit:
            slowest = min((one for one in self._members if one.unsent), key=lambda one: one.idle_since or 0.0)
            self._unsent -= slowest.unsent
            self._let_go(slowest)

    def _let_go(self, member: Member) -> None:
        self.leave(member)
        member.make_way()

    async def watch(self) -> None:
        """Look at every client from time to time, for ever. One timer for all costs less than one a request."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_SWEEP)
            now = loop.time()
            for member in list(self._members):
                try:
                    member.look(now)
                except Exception:  # whatever is wrong with one, the others are still looked at
                    _log.exception("a connection is cut off: it can't be looked at")
                    member.cut_off()
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
