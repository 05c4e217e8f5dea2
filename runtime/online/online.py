"""How a cascade learns from labels that come back."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from offramp.runtime.errors import InputError
from offramp.runtime.online.fitting.recalibrator import Recalibrator

Mode = Literal["off", "observe", "propose", "automatic"]
MODES: tuple[Mode, ...] = get_args(Mode)


@dataclass(frozen=True)
class Limits:
    """How much is kept, and how soon it is on the disk.

    rows, bytes, days: what a model's kept rows may be; the oldest go first. bytes counts what rows hold; a SQLite file
    is up to a third larger. unflushed, unflushed_bytes: the most rows, and the most bytes of them, that wait in memory,
    which is what a crash can lose; what finds no place is dropped and counted. seconds: the longest that a row waits.
    durable: `append` returns when its rows are on the disk; a crash loses none.
    """

    rows: int = 100_000
    bytes: int = 512 * 2**20
    days: float = 30.0
    unflushed: int = 2048
    unflushed_bytes: int = 64 * 2**20
    seconds: float = 5.0
    durable: bool = False

    def __post_init__(self) -> None:
        for name in ("rows", "bytes", "unflushed", "unflushed_bytes"):
            if not getattr(self, name) >= 1:
                raise InputError(f"{name} is {getattr(self, name)!r}, expected at least 1.")
        for name in ("days", "seconds"):
            if not getattr(self, name) > 0:
                raise InputError(f"{name} is {getattr(self, name)!r}, expected more than 0.")


@dataclass(frozen=True)
class Online:
    """Where served rows and labels are kept, and what is done with them.

    where: the path of a SQLite file, which is made if there is none, or postgresql://…. mode: "off" keeps rows and
    nothing else; "observe" tries candidates and logs what would be done; "propose" leaves the last word to a person;
    "automatic" puts what the guard accepts in force. None is as the file says, which begins with "observe".
    recalibrator: which family is fitted, and to how much of the past. every: labels between two looks, which are free:
    the guard's promise holds however often it is asked. rows: the newest of an operating point that a look reads, which
    takes 2 bytes for each class, exit and row meanwhile.
    share: of the judge rows that one key may have sent. shadow: of the rows that leave early, the share that is run
    through all exits after they were answered, by a thread of its own; `cwmcs` and `temperature` need such rows.
    limits: how much is kept, and how soon it is on the disk.

    On a CPU rows go through `cascade_every_exit.onnx` with this, which gives every exit's logits; on a device, and in
    bundles of an earlier offramp, which lack it, blocks are run one by one.
    """

    where: str | Path
    mode: Mode | None = None
    recalibrator: Recalibrator = field(default_factory=Recalibrator)
    every: int = 100
    rows: int = 20_000
    share: float = 1.0
    shadow: float = 0.01
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if not isinstance(self.where, str | Path) or not str(self.where):
            raise InputError(f"where is {self.where!r}, expected the path of a file, or postgresql://….")
        if self.mode is not None and self.mode not in MODES:
            raise InputError(f"mode is {self.mode!r}, expected one of {', '.join(MODES)}.")
        for name in ("every", "rows"):
            if not getattr(self, name) >= 1:
                raise InputError(f"{name} is {getattr(self, name)!r}, expected at least 1.")
        if not 0 < self.share <= 1:
            raise InputError(f"share is {self.share!r}, expected more than 0 and at most 1.")
        if not 0 <= self.shadow <= 1:
            raise InputError(f"shadow is {self.shadow!r}, expected from 0 to 1.")
        if not self.shadow and self.recalibrator.method in ("cwmcs", "temperature"):
            raise InputError(
                f"shadow is 0, but {self.recalibrator.method} can change the order of rows, which only rows with all "
                "exits known can judge: expected more than 0, or the recalibrator rank_preserving."
            )
