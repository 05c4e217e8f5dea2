"""A process killed at a chosen moment, for tests."""

import os
import sys
from collections.abc import Callable
from typing import Any

TOUCHES = {"open", "write", "fsync", "rename", "replace", "mkdir", "unlink", "remove", "rmdir"}


def die_at(touch: int) -> Callable[[], int]:
    """Let this process die in front of its n-th touch of the disk. Returned: how many there were."""
    done = 0

    def die(_: Any, event: str, called: Any) -> None:
        nonlocal done
        if event == "c_call" and called.__name__ in TOUCHES:
            if done == touch:
                os._exit(9)
            done += 1

    sys.setprofile(die)
    return lambda: done


def killed_at(touch: int, work: Callable[[], Any]) -> bool:
    """Do the work in another process that dies in front of its n-th touch of the disk. Did it die?"""
    child = os.fork()
    if child == 0:
        die_at(touch)
        work()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
