"""Kept rows as a window."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import sqlalchemy as sa
from numpy.typing import NDArray
from offramp.runtime.errors import StoreError
from offramp.runtime.online.store.packing import unpack
from offramp.runtime.online.store.schema import served
from offramp.runtime.online.store.source import Source
from offramp.runtime.online.window import Window, joined

# Rows whose objects exist at a time. Ten thousand rows' were 25 MB in small pieces, that whatever else was made
# meanwhile lay between, so that a server which looks every minute grew by 60 MB in a million rows.
_AT_ONCE = 1000


def read(
    connection: sa.Connection,
    source: Source,
    *,
    point: str | None,
    since: float | None,
    limit: int,
    complete: bool,
    labelled: bool,
) -> Window:
    """The newest rows that fit, the oldest of them first."""
    chosen = sa.select(served).where(served.c.bundle == source.bundle)
    if complete:
        chosen = chosen.where(served.c.complete)
    if labelled:
        chosen = chosen.where(served.c.label.is_not(None))
    if not complete and not labelled:
        chosen = chosen.where(served.c.model == source.model)
    if point is not None:
        chosen = chosen.where(served.c.point == point)
    if since is not None:
        chosen = chosen.where(served.c.time >= since)
    found = connection.execute(chosen.order_by(served.c.time.desc(), served.c.seq.desc()).limit(limit))
    try:
        parts = [_window(lines[::-1], source) for lines in found.partitions(_AT_ONCE)]
    except (TypeError, ValueError, OverflowError) as error:
        raise StoreError(f"kept rows can't be read, so the store is damaged ({error}).") from error
    return joined(parts[::-1]) if parts else _window([], source)


def _window(lines: Sequence[Any], source: Source) -> Window:
    score, logits = unpack([line.exits for line in lines], source.exits, source.classes)

    def column(name: str, kind: Any, otherwise: Any = None) -> NDArray[Any]:
        values = (getattr(line, name) for line in lines)
        return np.array([otherwise if value is None else value for value in values], kind)

    return Window(
        time=column("time", np.float64),
        labelled=column("labelled", np.float64, np.nan),
        version=column("version", np.int64),
        point=column("point", np.str_),
        exit=column("exit", np.int64),
        abstained=column("abstained", np.bool_),
        score=score,
        logits=logits,
        label=column("label", np.int64, -1),
        shadow=column("shadow", np.float64),
        asked=column("asked", np.float64, np.nan),
        key=column("key", np.int64, -1),
        seq=column("seq", np.int64),
    )
