"""What a request asks of the model, and what it is answered, whatever the protocol."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from offramp.runtime.execution.answers import Answers
from offramp.runtime.predictions import Seen

PRIORITIES = range(1, 10)  # 1 goes first
DEFAULT_PRIORITY = 5


@dataclass(frozen=True)
class Group:
    """Rows of one shape, which a cascade can run together.

    arrays: the model's inputs. sizes: of every symbolic axis. positions: int64 (n,), where these rows stand
    in their request.
    """

    arrays: Mapping[str, NDArray[Any]]
    sizes: Mapping[str, int]
    positions: NDArray[np.int64]


@dataclass(frozen=True)
class Query:
    """What a request asks of the model. operating_point and max_exit are valid: see OperatingPoints.choose.

    named: whether the request itself named the point, which then is never replaced by another. deadline: seconds after
    which the best answer so far will do. request_id: by which its rows are kept. seen: of a shadow run, whose rows
    have been answered and go to the last exit so that this is filled with what every exit says of them.
    """

    groups: tuple[Group, ...]
    rows: int
    operating_point: str
    max_exit: int
    probabilities: bool = False
    timeout: float | None = None
    priority: int = DEFAULT_PRIORITY
    named: bool = True
    deadline: float | None = None
    request_id: str = ""
    seen: Seen | None = None

    @property
    def bytes(self) -> int:
        """What its arrays take in memory."""
        return sum(array.nbytes for group in self.groups for array in group.arrays.values())


@dataclass(frozen=True)
class Answer:
    """The answers to a query's rows, in their order; fields as in runtime's Predictions.

    operating_point: by whose rule. overloaded: whether the server took that because it was overloaded.
    probabilities: float32 (N, C) if asked for. flops_full: what the whole network would have cost.
    """

    label: NDArray[np.int64]
    confidence: NDArray[np.float64]
    exit: NDArray[np.int32]
    abstain: NDArray[np.bool_]
    flops: NDArray[np.int64]
    involuntary: NDArray[np.bool_]
    probabilities: NDArray[np.float32] | None
    flops_full: int
    operating_point: str = ""
    overloaded: bool = False

    @classmethod
    def of(cls, answers: Answers, *, flops_full: int, operating_point: str = "", overloaded: bool = False) -> Self:
        """Every row's answer, as the runtime wrote it down."""
        return cls(
            label=answers.label,
            confidence=answers.confidence,
            exit=answers.exit,
            abstain=answers.abstain,
            flops=answers.flops,
            involuntary=answers.involuntary,
            probabilities=answers.probabilities,
            flops_full=flops_full,
            operating_point=operating_point,
            overloaded=overloaded,
        )

    def __len__(self) -> int:
        return len(self.label)

    def part(self, rows: NDArray[np.int64]) -> "Answer":
        """The answers to some of the rows; flops_full stays the whole request's."""
        some: dict[str, Any] = {name: v[rows] for name, v in vars(self).items() if isinstance(v, np.ndarray)}
        return replace(self, **some)
