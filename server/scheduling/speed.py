"""How fast rows run here lately, and how many of them therefore make a batch."""

import math

from offramp.server.scheduling.scheduler import Place

AT_MOST = 1024
"""Rows of a batch. What more rows gain is under 2%."""

_SECONDS = 0.025  # that a batch should take: others wait for it to end
_FEW, _FEW_SECONDS = 8, 0.25  # so many rows may take this long: one by one they'd take twice as long
_UNKNOWN, _UNKNOWN_FLOPS = 32, 8 * 10**9  # rows of the first batch, and what it may cost
_WEIGHT = 0.2
# Of a batch's own time so much may be spent on filling up: every row of the batch waits for that, and the time itself
# is known roughly. Of 0, .1, .3 and 1 this gave most rows a second for 16 and for 64 clients of MiniLM.
_SPENT = 0.3
_ODD = 1.5  # times what was expected: more isn't taken over from one batch, during which the machine did something else
_FORGOTTEN = 0.999  # what is left of a time alone with each batch in a lane, so that it is tried again some time
_KEPT, _ENOUGH = 0.99, 16  # of a line's past with each batch, and batches until it is believed


class Line:
    """A straight line through what was measured lately: seconds of a batch by its FLOPs."""

    def __init__(self) -> None:
        self._sums = [0.0] * 5  # of 1, x, y, x*x, x*y

    def saw(self, flops: float, seconds: float) -> None:
        new = (1.0, flops, seconds, flops * flops, flops * seconds)
        self._sums = [old * _KEPT + value for old, value in zip(self._sums, new, strict=True)]

    @property
    def worth(self) -> float:
        """FLOPs that could be run in the time that a batch takes beside its rows: intercept over slope."""
        n, x, y, xx, xy = self._sums
        spread = n * xx - x * x
        if n < _ENOUGH or spread <= 1e-3 * n * xx:  # all of one size: nothing can be told apart
            return 0.0
        slope = (n * xy - x * y) / spread
        start = (y - slope * x) / n
        return min(start / slope, x / n) if slope > 0 and start > 0 else 0.0


class _Usual:
    """What batches are like lately."""

    def __init__(self) -> None:
        self._flops = self._seconds = 0.0

    def saw(self, flops: float, seconds: float) -> None:
        weight = _WEIGHT if self._seconds else 1.0
        self._flops += (flops - self._flops) * weight
        self._seconds += (seconds - self._seconds) * weight

    def saw_alone(self, flops: float, seconds: float) -> None:
        """As `saw`, but for what is odd."""
        self.saw(flops, min(seconds, _ODD * self.seconds_for(flops)) if self._seconds else seconds)

    def forget(self) -> None:
        self._seconds *= _FORGOTTEN

    def seconds_for(self, flops: float) -> float:
        """From above: a smaller batch takes as long, a larger one in proportion."""
        return self._seconds * max(1.0, flops / max(self._flops, 1.0))


class Speed:
    """FLOPs and rows a second, lately."""

    def __init__(self) -> None:
        self._flops: dict[object, float] = {}  # by way
        self._lines: dict[object, Line] = {}
        # All batches and those of one row, by way: wherever they ran, and by the event loop, where no other thread has
        # Python's lock.
        self._anywhere: tuple[dict[object, _Usual], ...] = ({}, {})
        self._undisturbed: tuple[dict[object, _Usual], ...] = ({}, {})
        self._rows = 0.0  # in all, answered
        self.batch_seconds = 0.0

    def ran(self, place: Place, rows: int, row_flops: int, seconds: float, *, undisturbed: bool = False) -> None:
        """A batch has run. row_flops: as `rows_at_once` takes them. undisturbed: by the event loop, not in a lane."""
        now = rows * max(row_flops, 1) / max(seconds, 1e-9)
        before = self._flops.get(place.way)
        kinds = slice(None if rows == 1 else 1)
        for kind in self._anywhere[kinds]:
            kind.setdefault(place.way, _Usual()).saw(rows * row_flops, seconds)
        if undisturbed:
            for kind in self._undisturbed[kinds]:
                kind.setdefault(place.way, _Usual()).saw_alone(rows * row_flops, seconds)
        else:
            for kind in self._undisturbed:
                if place.way in kind:
                    kind[place.way].forget()
        self._lines.setdefault(place.way, Line()).saw(rows * row_flops, seconds)
        self._flops[place.way] = now if before is None else before + (now - before) * _WEIGHT
        self.batch_seconds += (seconds - self.batch_seconds) * (_WEIGHT if self.batch_seconds else 1.0)

    def answered(self, rows: int, seconds: float) -> None:
        """So many rows were answered within so much time of work."""
        now = rows / max(seconds, 1e-9)
        self._rows += (now - self._rows) * (_WEIGHT if self._rows else 1.0)

    def worth(self, way: object) -> float:
        """FLOPs that a batch's own time is worth."""
        line = self._lines.get(way)
        return 0.0 if line is None else line.worth * _SPENT

    def rows_at_once(self, place: Place, row_flops: int) -> int:
        """The most rows of a batch at a place. row_flops: of one row there that leaves as late as it can.

        Measured with what rows really took, early leavers among them.
        """
        per_second = self._flops.get(place.way)
        if per_second is None:
            return max(1, min(_UNKNOWN, _UNKNOWN_FLOPS // max(row_flops, 1)))
        rows = per_second / max(row_flops, 1)
        return max(1, min(AT_MOST, int(max(rows * _SECONDS, min(_FEW, rows * _FEW_SECONDS)))))

    def expected_seconds(self, way: object, flops: int) -> float:
        """What a batch should take in the event loop; infinite while nothing is known of such.

        In lanes batches wait for Python's lock, which the event loop has the longer the more there is to do: by those
        times a small model's rows, once they go to lanes, would go there for good.
        """
        kinds = self._undisturbed if way in self._undisturbed[0] else self._anywhere
        return min((kind[way].seconds_for(flops) for kind in kinds if way in kind), default=math.inf)

    def row_seconds(self) -> float:
        """Seconds from one answered row to the next, 0 while that isn't known."""
        return 1 / self._rows if self._rows else 0.0

    def seconds_for(self, rows: int) -> float:
        """Until so many rows are answered; a second if nothing is known yet, a minute at most."""
        return min(rows / self._rows, 60.0) if self._rows else 1.0
