"""What a cascade answers, and what it records."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from offramp.runtime.errors import InputError


@dataclass(frozen=True, repr=False)
class Predictions:
    """N answers, in the order of the rows that were asked about.

    label: int64 (N,), index into the bundle's classes; -1 where the logits were NaN.
    score: float32 (N,) log-odds at the exit the row left from, before calibration.
    exit: int32 (N,). abstain: bool (N,), True: don't rely on the label.
    flops: int64 (N,), what each row's own blocks cost at the axes of its own request.
    involuntary: bool (N,), True: the row would have gone on, but for `max_exit`, a deadline, or a look in between.
    executed: FLOPs really run by each block, rows that rode along included.
    """

    label: NDArray[np.int64]
    score: NDArray[np.float32]
    exit: NDArray[np.int32]
    abstain: NDArray[np.bool_]
    flops: NDArray[np.int64]
    involuntary: NDArray[np.bool_]
    _confidence: Callable[[], NDArray[np.float64]] = field(repr=False, compare=False)
    _log_odds: Callable[[], NDArray[np.float64]] = field(repr=False, compare=False)
    executed: tuple[int, ...] = ()
    _fetched: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    _again: Callable[[str], Any] | None = field(default=None, repr=False, compare=False)
    _classes: Sequence[str] = field(default=(), repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.label)

    def __repr__(self) -> str:
        exits, counts = np.unique(self.exit, return_counts=True)
        left = ", ".join(f"{count} at exit {j}" for j, count in zip(exits.tolist(), counts.tolist(), strict=True))
        abstain, cut = int(self.abstain.sum()), int(self.involuntary.sum())
        parts = [
            f"{len(self)} rows",
            left,
            f"{abstain} abstain" if abstain else "",
            f"{cut} involuntary" if cut else "",
        ]
        return f"<Predictions: {'; '.join(part for part in parts if part)}>"

    @property
    def class_name(self) -> list[str | None]:
        """The label of each row as the bundle names it; None where the logits were NaN."""
        return [self._classes[k] if k >= 0 else None for k in self.label.tolist()]

    @cached_property
    def confidence(self) -> NDArray[np.float64]:
        """float64 (N,) in [0, 1], calibrated probability that the label is right."""
        return self._confidence()

    @cached_property
    def log_odds(self) -> NDArray[np.float64]:
        """float64 (N,) calibrated confidence as log-odds, which keep their order where it rounds to 1."""
        return self._log_odds()

    def fetched(self, kind: str) -> Any:
        """What came with the answer, or is got now: "probabilities" or "routing".

        Raises InputError where it can't be got any more: answers that were pickled have no cascade to ask.
        """
        if kind not in self._fetched:
            if self._again is None:
                raise InputError(f"{kind} didn't come with these answers: predict with fetch=({kind!r},).")
            self._fetched[kind] = self._again(kind)
        return self._fetched[kind]

    def __reduce__(self) -> tuple[Callable[..., "Predictions"], tuple[Any, ...]]:
        """Pickled as what is known by now; the way back to the cascade stays behind."""
        answers = (self.label, self.score, self.exit, self.abstain, self.flops, self.involuntary)
        return _restored, (answers, self.confidence, self.log_odds, self.executed, self._fetched, self._classes)

    @property
    def probabilities(self) -> NDArray[np.float32]:
        """(N, C) class probabilities at each row's exit.

        Logits aren't kept unless somebody asks: with predict(..., fetch=("probabilities",)) they come with
        the answer; otherwise the first access runs the rows again.
        """
        return np.asarray(self.fetched("probabilities"))

    @property
    def routing(self) -> NDArray[np.float32]:
        """(L, N) routing entropies; NaN for layers a row didn't run. Fetched like probabilities."""
        return np.asarray(self.fetched("routing"))


def _restored(
    answers: tuple[Any, ...], confidence: Any, odds: Any, ran: Any, fetched: Any, classes: Any
) -> Predictions:
    label, score, left, abstain, flops, involuntary = answers
    return Predictions(
        label,
        score,
        left,
        abstain,
        flops,
        involuntary,
        _confidence=lambda: confidence,
        _log_odds=lambda: odds,
        executed=ran,
        _fetched=fetched,
        _classes=classes,
    )


@dataclass(frozen=True)
class Records:
    """Every exit's outputs for N rows: what calibration works on.

    logits: (J, N, C), one array or one (N, C) an exit.
    score: float32 (J, N) and label: int64 (J, N), as the cascade's gates saw them.
    flops: int64 (J, N), cumulative: what a row costs that leaves at exit j.
    features: one array an exit (N, …), or None. external, reservation: (J, N), or None.
    routing: (L, N), or None. routing_seen: for each exit, the rows of it that are of layers the exit has seen.
    truth: int64 (N,) true labels, -1 where unknown, or None.
    """

    logits: NDArray[Any] | tuple[NDArray[Any], ...]
    score: NDArray[np.float32]
    label: NDArray[np.int64]
    flops: NDArray[np.int64]
    features: tuple[NDArray[Any], ...] | None = None
    routing: NDArray[Any] | None = None
    external: NDArray[Any] | None = None
    reservation: NDArray[Any] | None = None
    truth: NDArray[np.int64] | None = None
    routing_seen: tuple[tuple[int, ...], ...] | None = None

    def __len__(self) -> int:
        return int(self.score.shape[1])
