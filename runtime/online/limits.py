"""How much of what was served is kept."""

from dataclasses import dataclass

from offramp.runtime.errors import InputError


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
