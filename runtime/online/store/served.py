"""A batch of rows as it was answered: what the serving side hands to the store."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from offramp.runtime.errors import InputError

MOST_CHARACTERS = 200


@dataclass(frozen=True, eq=False)
class Served:
    """N rows that one calibration version answered at one operating point. The arrays are the store's from now on.

    request: N ids, any text of 1 to 200 characters. row: (N,) each row's index in its request; both name the row.
    time: when it was answered, seconds since the epoch; one value or (N,). version: of the calibration.
    exit: (N,) where each row left. abstained: (N,) bool.
    score: (J, N) raw scores, NaN at exits a row didn't run. logits: J entries (N, C), None at exits that no row ran;
    what they hold at exits that a row didn't run is never looked at.
    shadow: the probability with which a row is run to the last exit afterwards; one value or (N,).
    asked: the probability with which its label is asked for, likewise; NaN or 0 where unknown, which counts as 1.
    inputs: N times the row's inputs as bytes, only where somebody asked for keeping them.

    Raises InputError naming the field.
    """

    request: Sequence[str]
    row: ArrayLike
    time: ArrayLike
    version: int
    point: str
    exit: ArrayLike
    abstained: ArrayLike
    score: NDArray[np.floating]
    logits: Sequence[NDArray[np.floating] | None]
    shadow: ArrayLike = 0.0
    asked: ArrayLike = 1.0
    inputs: Sequence[bytes] | None = None

    def __post_init__(self) -> None:
        check_requests(self.request)
        if self.score.ndim != 2 or self.score.shape[1] != len(self.request):
            raise InputError(f"score has the shape {self.score.shape}, expected (exits, {len(self.request)}).")
        if len(self.logits) != len(self.score):
            raise InputError(f"logits has {len(self.logits)} exits, score {len(self.score)}.")
        if self.inputs is not None and len(self.inputs) != len(self.request):
            raise InputError(f"inputs has {len(self.inputs)} rows, request {len(self.request)}.")

    def __len__(self) -> int:
        return len(self.request)

    @cached_property
    def nbytes(self) -> int:
        """Bytes that the arrays take until they are written."""
        return (
            self.score.nbytes + sum(z.nbytes for z in self.logits if z is not None) + sum(map(len, self.inputs or ()))
        )

    def first(self, rows: int) -> "Served":
        """The first rows of the batch."""

        def cut(values: ArrayLike) -> NDArray[Any]:
            array = np.asarray(values)
            return array[:rows] if array.ndim else array

        return replace(
            self,
            request=self.request[:rows],
            score=self.score[:, :rows],
            logits=[None if z is None else z[:rows] for z in self.logits],
            inputs=None if self.inputs is None else self.inputs[:rows],
            row=cut(self.row),
            time=cut(self.time),
            exit=cut(self.exit),
            abstained=cut(self.abstained),
            shadow=cut(self.shadow),
            asked=cut(self.asked),
        )


def check_requests(ids: Sequence[str]) -> None:
    """Raises InputError naming the first id that isn't a text of 1 to 200 characters."""
    for at, name in enumerate(ids):
        if not isinstance(name, str) or not 0 < len(name) <= MOST_CHARACTERS:
            said = f"{name[:40]!r}…, {len(name)} characters" if isinstance(name, str) and name else repr(name)
            raise InputError(f"request[{at}] is {said}: expected a text of 1 to {MOST_CHARACTERS} characters.")
