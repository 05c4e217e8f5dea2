"""What a cascade would answer, from records: every rule can be tried without running the model again."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from offramp.runtime import arrays, scores
from offramp.runtime.arrays import Array, Bools, Floats, Ints
from offramp.runtime.errors import InputError
from offramp.runtime.execution.answers import Answers
from offramp.runtime.gate import Gate
from offramp.runtime.points import OperatingPoint

# Rows decided at once; bounds what is read of memory-mapped logits.
ROWS = 1 << 14


class Recorded(Protocol):
    """What is read of records: logits (J, N, C) or one (N, C) an exit, cumulative flops (J, N).

    Where there, also score and label (J, N) as the gates saw them, and routing (L, N).
    """

    @property
    def logits(self) -> Any: ...
    @property
    def flops(self) -> Any: ...


@dataclass(frozen=True)
class Simulation:
    """N answers in the order of the records, as `Predictions` of a cascade.

    exit, label, flops: (N,) integers. score: (N,) log-odds at that exit before calibration, confidence: (N,)
    calibrated, log_odds: the same as log-odds. abstain: (N,) bool.
    """

    exit: Ints
    label: Ints
    score: Array
    confidence: Floats
    log_odds: Floats
    abstain: Bools
    flops: Array

    def __len__(self) -> int:
        return len(self.exit)


def simulate(
    records: Recorded, operating_point: OperatingPoint, *, routing_layers: Sequence[int] | None = None
) -> Simulation:
    """Run an operating point's gate over recorded rows, exit by exit: equal to `Cascade.predict` on them.

    routing_layers: how many of the recorded routing layers each exit has seen, default all of them.
    """
    exits = len(records.logits)
    gate = Gate(operating_point, exits)
    flops = np.asarray(records.flops)
    if flops.ndim != 2 or len(flops) != exits:
        raise InputError(f"records: expected flops of shape ({exits}, rows), got {flops.shape}.")
    if routing_layers is not None and len(routing_layers) != exits:
        raise InputError(f"routing_layers: expected {exits} numbers, got {len(routing_layers)}.")
    rows = flops.shape[1]
    kind = getattr(records, "score", None)
    answers = Answers(rows, score=np.float64 if kind is None else np.asarray(kind).dtype, flops=flops.dtype)
    for part in arrays.row_blocks(rows, 1, ROWS):
        _walk(records, gate, np.arange(part.start, part.stop), routing_layers, answers)
    answers.flops[:] = flops[answers.exit, np.arange(rows)]
    return Simulation(
        exit=answers.exit.astype(np.int64),
        label=answers.label,
        score=answers.score,
        confidence=answers.confidence,
        log_odds=answers.log_odds,
        abstain=answers.abstain,
        flops=answers.flops,
    )


def _walk(records: Recorded, gate: Gate, playing: Ints, routing_layers: Sequence[int] | None, answers: Answers) -> None:
    for j in gate.point.exits:  # an exit that is switched off isn't run, so its gate sees nothing
        if not len(playing):
            return
        label, score = _seen(records, j, playing)
        aux: dict[str, Any] = {}
        if gate.needs(j) & {"logits", "entropy"}:
            aux["logits"] = np.asarray(records.logits[j][playing])
        if "routing" in gate.needs(j):
            aux["routing"] = _routing(records, j, playing, routing_layers)
        decision = gate.decide(j, label, score, aux)
        answers.keep(j, decision, decision.leave, playing, label, score)
        playing = playing[~decision.leave]


def _seen(records: Recorded, j: int, rows: Ints) -> tuple[Ints, Array]:
    """Label and score as the gate saw them; from the logits where they weren't recorded."""
    label, score = getattr(records, "label", None), getattr(records, "score", None)
    if label is not None and score is not None:
        return np.asarray(label[j])[rows], np.asarray(score[j])[rows]
    logits = np.asarray(records.logits[j][rows])
    return scores.top_label(logits), scores.log_odds(logits)


def _routing(records: Recorded, j: int, rows: Ints, layers: Sequence[int] | None) -> Array:
    routing = getattr(records, "routing", None)
    if routing is None:
        raise InputError("records: this operating point's calibrators need routing, which wasn't recorded.")
    seen = np.asarray(routing)[: None if layers is None else layers[j]]
    return np.asarray(seen[:, rows])
