"""How many cores this process may use: by its affinity, and by the quotas of its control groups."""

import math
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def usable_cores() -> int:
    """Cores this process may use: the fewer of affinity and quota, rounded up, at least 1."""
    return max(1, math.ceil(min(_affinity(), cpu_quota())))


def _affinity() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except (AttributeError, OSError):  # not Linux, or a sandbox that doesn't say
        return os.cpu_count() or 1


def cpu_quota(root: Path = Path("/")) -> float:
    """CPUs that this process's control groups allow it, the tightest of it and all its parents; infinity if none does.

    root: where proc/ and sys/ lie.
    """
    return min((_quota(group) for group in _groups(root)), default=math.inf)


def _quota(group: Path) -> float:
    """One group's own limit, in version 2's file or version 1's two."""
    try:
        quota, period = (group / "cpu.max").read_text().split()
        return math.inf if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        pass
    try:
        allowed = int((group / "cpu.cfs_quota_us").read_text())
        return math.inf if allowed <= 0 else allowed / int((group / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError, ZeroDivisionError):
        return math.inf


def _groups(root: Path) -> Iterator[Path]:
    """Folders of the groups that this process is in, from its own up to where they are mounted."""
    try:
        own = (root / "proc/self/cgroup").read_text(errors="surrogateescape").splitlines()
        mounts = (root / "proc/self/mountinfo").read_text(errors="surrogateescape").splitlines()
    except OSError:
        own, mounts = [], []
    paths: dict[str, str] = {}  # of version 2 under "", of version 1 under the controller
    for line in own:
        controllers, path = line.split(":", 2)[1:]
        paths |= dict.fromkeys(controllers.split(","), path)
    found = False
    for line in mounts:
        # 31 23 0:28 /root /mounted/at options optional… - type source options
        before, after = line.split(" - ", 1)
        top, at = (PurePosixPath(_spelled(field)) for field in before.split()[3:5])
        kind, options = after.split(" ", 2)[0::2]
        if kind == "cgroup2":
            group = paths.get("")
        elif kind == "cgroup" and "cpu" in options.split(","):
            group = paths.get("cpu")
        else:
            continue
        found = True
        yield from _upwards(root / at.relative_to("/"), top, group)
    if not found:
        yield from (root / "sys/fs/cgroup", root / "sys/fs/cgroup/cpu")


def _upwards(mount: Path, top: PurePosixPath, path: str | None) -> Iterator[Path]:
    """A group and its parents as far as they are mounted: `top` is the group that the mount shows."""
    own = PurePosixPath(path or top)
    # A namespace of its own shows groups outside of it as /.., and the mount then is all there is to see.
    inner = own.relative_to(top).parts if own.is_relative_to(top) and ".." not in own.parts else ()
    for depth in range(len(inner), -1, -1):
        yield mount.joinpath(*inner[:depth])


def _spelled(field: str) -> str:
    """mountinfo writes blanks and backslashes in octal."""
    return re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), field)
