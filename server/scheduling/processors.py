"""Cores that several tasks share, under a clock that isn't real."""

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from typing import Protocol

Do = Callable[[], None]


class Clock(Protocol):
    """What tells the time, and when it is time."""

    now: float

    def at(self, when: float, do: Do) -> None:
        """Have something done at a time."""


class Processors:
    """Processor sharing: tasks that ask for more cores than there are all go on slower, by the same factor.

    That is what an operating system does to threads that never wait for each other. Ends are kept in the time that a
    task sees, which goes by more slowly than the clock's, so that one comes or goes without touching the others.
    """

    def __init__(self, clock: Clock, cores: float, disturbance: float = 0.0) -> None:
        """disturbance: by how much of its time each task that runs beside another one holds it up, whatever cores
        there are: caches, locks, threads of one batch that wait for each other.
        """
        self._clock, self._cores, self._disturbance = clock, cores, disturbance
        self._seen = self._since = self._demand = 0.0
        self._tasks: list[tuple[float, int, float, Do]] = []  # by their end
        self._numbers, self._plans = itertools.count(), 0

    def start(self, seconds: float, demand: float, then: Do) -> None:
        """A task begins. seconds: that it takes alone. demand: cores that it keeps busy. then: called at its end."""
        self._look()
        heapq.heappush(self._tasks, (self._seen + seconds, next(self._numbers), demand, then))
        self._demand += demand
        self._plan()

    @property
    def pause(self) -> float:
        """Seconds since anything ran; 0 if something does."""
        return 0.0 if self._tasks else self._clock.now - self._since

    def _slower(self) -> float:
        return max(1.0, self._demand / self._cores) * (1 + self._disturbance * max(0, len(self._tasks) - 1))

    def _look(self) -> None:
        self._seen += (self._clock.now - self._since) / self._slower()
        self._since = self._clock.now

    def _plan(self) -> None:
        """When the next one ends, if nothing changes until then."""
        self._plans += 1
        if self._tasks:
            plan, left = self._plans, max(0.0, self._tasks[0][0] - self._seen)
            self._clock.at(self._clock.now + left * self._slower(), lambda: self._end(plan))

    def _end(self, plan: int) -> None:
        if plan != self._plans:
            return
        self._look()
        self._seen, _, demand, then = heapq.heappop(self._tasks)
        self._demand = self._demand - demand if self._tasks else 0.0
        self._plan()
        then()


class Thread:
    """Work that one thread does piece after piece, in the order in which it came."""

    def __init__(self, processors: Processors) -> None:
        self._processors = processors
        self._waiting: deque[tuple[float, Do]] = deque()
        self._busy = False
        self.spent = 0.0  # seconds of work

    def do(self, seconds: float, then: Do) -> None:
        """A piece of work. then: called when it is done."""
        if self._busy:
            self._waiting.append((seconds, then))
        else:
            self._begin(seconds, then)

    def _begin(self, seconds: float, then: Do) -> None:
        self._busy = True
        self.spent += seconds

        def done() -> None:
            self._busy = False
            if self._waiting:
                self._begin(*self._waiting.popleft())
            then()

        self._processors.start(seconds, 1.0, done)
