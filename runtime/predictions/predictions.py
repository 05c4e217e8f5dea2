"""What a cascade answers."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from offramp.runtime.errors import InputError

_ARRAYS = ("label", "score", "exit", "abstain", "flops", "involuntary")
_ROUNDING = 1e-4
"""How far the scores of one row may be apart in two runs, relatively and absolutely."""
_FIELDS = frozenset((*_ARRAYS, "executed", "_confidence", "_log_odds", "_fetched", "_again", "_classes"))


class Predictions:
    """N answers, in the order of the rows that were asked about. Read only.

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
    executed: tuple[int, ...]
    _confidence: Callable[[], NDArray[np.float64]]
    _log_odds: Callable[[], NDArray[np.float64]]
    _fetched: dict[str, Any]
    _again: Callable[[str], "Predictions"] | None
    _classes: Sequence[str]

    def __init__(
        self,
        *,
        label: NDArray[np.int64],
        score: NDArray[np.float32],
        exit: NDArray[np.int32],
        abstain: NDArray[np.bool_],
        flops: NDArray[np.int64],
        involuntary: NDArray[np.bool_],
        confidence: Callable[[], NDArray[np.float64]],
        log_odds: Callable[[], NDArray[np.float64]],
        executed: tuple[int, ...] = (),
        fetched: Mapping[str, Any] | None = None,
        again: "Callable[[str], Predictions] | None" = None,
        classes: Sequence[str] = (),
    ) -> None:
        """confidence, log_odds: make them when they are first looked at. fetched: what came with the answers.

        again: asks about the same rows once more, to have what didn't come. classes: the bundle's names.
        """
        self.__dict__.update(
            label=label,
            score=score,
            exit=exit,
            abstain=abstain,
            flops=flops,
            involuntary=involuntary,
            executed=executed,
            _confidence=confidence,
            _log_odds=log_odds,
            _fetched=dict(fetched or {}),
            _again=again,
            _classes=classes,
        )

    @classmethod
    def later(cls, field: Callable[[str], Any]) -> Self:
        """Answers whose fields are made out when somebody looks at them. field: gives one by its name here.

        Right after a run of ONNX Runtime nothing of Python is left in the processor's caches, so whatever is made out
        is waited for several times longer than in a hot loop.
        """
        made = cls.__new__(cls)
        made.__dict__["_field"] = field
        return made

    def __getattr__(self, name: str) -> Any:
        field = self.__dict__.get("_field")
        if field is None or name not in _FIELDS:
            raise AttributeError(f"Predictions has no {name!r}.")
        return self.__dict__.setdefault(name, field(name))  # another thread may be looking too

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"Predictions.{name} can't be set: answers are read only.")

    def cut_short(self, rows: NDArray[np.bool_]) -> "Predictions":
        """The same answers, those `rows` involuntary as well."""
        return self._but(involuntary=self.involuntary | rows)

    def named(self, ids: NDArray[Any]) -> "Predictions":
        """The same answers, by these ids."""
        return self._but(_fetched={**self._fetched, "ids": ids})

    def _but(self, **changed: Any) -> "Predictions":
        """The same answers, but for these fields; what isn't made out yet still isn't."""
        made = Predictions.__new__(Predictions)
        made.__dict__.update({**self.__dict__, **changed})
        return made

    @property
    def ids(self) -> NDArray[Any]:
        """(N,) str, what `Cascade.feedback` knows the rows by. Raises InputError where nothing is kept."""
        if "ids" not in self._fetched:
            raise InputError(
                "these rows aren't kept: what a cascade loaded with recalibration=Online(path) answers by predict is."
            )
        ids: NDArray[Any] = self._fetched["ids"]
        return ids

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
        """What came with the answer, or is got now: "probabilities", "routing" or (never afterwards) "times".

        What is got now is got by asking about the caller's arrays once more. Neither a copy nor a checksum of them is
        kept, which every lone row would pay for: the answers themselves tell, for rows that were overwritten have other
        scores. Raises InputError then, and where nothing can be got any more: answers that were pickled have no cascade
        to ask.
        """
        if kind not in self._fetched:
            if self._again is None:
                raise InputError(f"{kind} didn't come with these answers: predict with fetch=({kind!r},).")
            asked = self._again(kind)
            if not self._same_as(asked):
                raise InputError(
                    f"{kind} can't be got any more: asked again, the rows get other answers, as overwritten inputs do. "
                    f"Predict with fetch=({kind!r},), or leave the arrays as they are until then."
                )
            self._fetched[kind] = asked.fetched(kind)
        return self._fetched[kind]

    def _same_as(self, other: "Predictions") -> bool:
        """Whether the same rows were answered, as far as their answers tell; a device may round otherwise each time."""
        return (
            len(self) == len(other)
            and np.array_equal(self.label, other.label)
            and np.array_equal(self.exit, other.exit)
            and np.allclose(self.score, other.score, rtol=_ROUNDING, atol=_ROUNDING, equal_nan=True)
        )

    def __reduce__(self) -> tuple[Callable[..., "Predictions"], tuple[Any, ...]]:
        """Pickled as what is known by now; the way back to the cascade stays behind."""
        answers = tuple(getattr(self, name) for name in _ARRAYS)
        return _restored, (answers, self.confidence, self.log_odds, self.executed, self._fetched, self._classes)

    @property
    def times(self) -> NDArray[np.float64]:
        """(N,) seconds from the call until each row was answered, for answers of predict(..., fetch=("times",))."""
        return np.asarray(self.exit_times[self.exit])

    @property
    def exit_times(self) -> NDArray[np.float64]:
        """(J,) seconds until all rows that came to each exit were answered there; NaN where none was asked."""
        return np.asarray(self.fetched("times"))

    @property
    def probabilities(self) -> NDArray[np.float32]:
        """(N, C) class probabilities at each row's exit.

        Logits aren't kept unless somebody asks: with predict(..., fetch=("probabilities",)) they come with
        the answer; otherwise the first access runs the rows again. Raises InputError if the arrays that were handed
        in have been overwritten since.
        """
        return np.asarray(self.fetched("probabilities"))

    @property
    def routing(self) -> NDArray[np.float32]:
        """(L, N) routing entropies; NaN for layers a row didn't run. Fetched like probabilities."""
        return np.asarray(self.fetched("routing"))


def _restored(
    answers: tuple[Any, ...], confidence: Any, odds: Any, ran: Any, fetched: Any, classes: Any
) -> Predictions:
    return Predictions(
        **dict(zip(_ARRAYS, answers, strict=True)),
        confidence=lambda: confidence,
        log_odds=lambda: odds,
        executed=ran,
        fetched=fetched,
        classes=classes,
    )
