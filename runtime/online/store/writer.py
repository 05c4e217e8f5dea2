"""Writing off the request path: what is to be written waits in memory, and one thread writes it in few transactions."""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Condition, Thread
from time import monotonic
from typing import Any

from offramp.runtime.errors import StoreError

_PATIENCE = 1.0  # seconds between attempts while the database can't be written
_SWEEP = 3600.0  # seconds after which it is written to without a task, for rows become too old


@dataclass(frozen=True, eq=False)
class Task:
    """Something to write. rows, bytes: what waiting for it takes. done: who waits for its end, if anybody does."""

    work: Any
    rows: int = 0
    bytes: int = 0
    done: "Future[Any] | None" = None


class Writer:
    """Tasks in the order they came, written together once enough of them wait, or one has waited long enough.

    alarm: why nothing can be written now, None when all is well. It ends by itself with the first success.
    dropped: rows that found no place, or whose writing was given up.
    """

    def __init__(self, write: Callable[[Sequence[Task]], list[Any]], *, rows: int, bytes: int, seconds: float) -> None:
        """write: writes tasks in one transaction, and gives for each a result, or the OfframpError it ended with.

        Without tasks it is asked whether anything can be written, after an alarm and once an hour. It may raise
        StoreError: nothing has been written then. rows, bytes: the most that waits, and so the most that a crash can
        lose. seconds: the longest that a row waits while the database can be written.
        """
        self.alarm: str | None = None
        self.dropped = 0
        self._write, self._most_rows, self._most_bytes, self._seconds = write, rows, bytes, seconds
        self._waiting: deque[Task] = deque()
        self._rows = self._bytes = self._asked = 0
        self._since = self._retry = self._written = monotonic()
        self._closed = False
        self._changed = Condition()
        self._thread = Thread(target=self._run, name="offramp-store", daemon=True)
        self._thread.start()

    @property
    def room(self) -> int:
        """Rows that find a place now."""
        return 0 if self._closed or self._bytes >= self._most_bytes else self._most_rows - self._rows

    def put(self, task: Task) -> bool:
        """Leave a task. Never waits: False, and its rows are counted as dropped, if there is no room."""
        with self._changed:
            if task.rows > self.room:
                self.dropped += task.rows
                return False
            self._add(task)
            return True

    def do(self, work: Any, rows: int = 0) -> Any:
        """Have it written now, and give its result. Raises StoreError; at once while there is an alarm."""
        done: Future[Any] = Future()
        with self._changed:
            refused = "the store is closed." if self._closed or not self._thread.is_alive() else self.alarm
            if refused is not None:
                self.dropped += rows
                raise StoreError(refused)
            self._add(Task(work, rows, 0, done))
        return done.result()

    def drop(self, rows: int) -> None:
        with self._changed:
            self.dropped += rows

    def close(self) -> None:
        """Write what waits, if it can be written, and end."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _add(self, task: Task) -> None:
        """The thread is woken only where it has to look at its watch anew: few tasks make it do so."""
        first, was_due = not self._waiting, self._enough
        self._waiting.append(task)
        self._rows += task.rows
        self._bytes += task.bytes
        self._asked += task.done is not None
        if first:
            self._since = monotonic()
        if first or self._enough > was_due:
            self._changed.notify()

    @property
    def _enough(self) -> bool:
        half = 2 * self._rows >= self._most_rows or 2 * self._bytes >= self._most_bytes
        return half or self._asked > 0

    @property
    def _due(self) -> float:
        """When to write next."""
        if self.alarm is not None:
            return self._retry
        if not self._waiting:
            return self._written + _SWEEP
        return self._since if self._enough else self._since + self._seconds

    def _run(self) -> None:
        while self._come():
            with self._changed:
                tasks = list(self._waiting)
            try:
                results = self._write(tasks)
            except StoreError as error:
                self._failed(error)
            except BaseException as error:  # ours to mend, but what waits behind these tasks isn't at fault
                self._end(tasks, [StoreError(f"writing failed: {error!r}") for _ in tasks])
                self.drop(sum(task.rows for task in tasks))
            else:
                self._end(tasks, results)

    def _come(self) -> bool:
        """Wait until there is something to do. False when there is nothing more, ever."""
        with self._changed:
            while not self._closed:
                now = monotonic()
                if now >= self._due:
                    return True
                self._changed.wait(self._due - now)
            return bool(self._waiting)

    def _end(self, tasks: Sequence[Task], results: Sequence[Any]) -> None:
        with self._changed:
            for task in tasks:
                self._waiting.popleft()
                self._forget(task)
            self._since = self._written = monotonic()
            self.alarm = None
        for task, result in zip(tasks, results, strict=True):
            if task.done is not None:
                _answer(task.done, result)

    def _failed(self, error: StoreError) -> None:
        """Who waits is told, also if he came during the attempt; rows wait on, unless it all ends here."""
        with self._changed:
            self.alarm, self._retry = str(error), monotonic() + _PATIENCE
            given_up = [task for task in self._waiting if self._closed or task.done is not None]
            for task in given_up:
                self._waiting.remove(task)
                self._forget(task)
                self.dropped += task.rows
        for task in given_up:
            if task.done is not None:
                _answer(task.done, error)

    def _forget(self, task: Task) -> None:
        self._rows -= task.rows
        self._bytes -= task.bytes
        self._asked -= task.done is not None


def _answer(done: "Future[Any]", result: Any) -> None:
    if isinstance(result, Exception):
        done.set_exception(result)
    else:
        done.set_result(result)
