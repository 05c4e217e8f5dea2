"""A process killed at a chosen moment, for tests."""

import os
import sys
from collections.abc import Callable
from typing import Any

TOUCHES = {"open", "write", "fsync", "rename", "replace", "mkdir", "unlink", "remove", "rmdir"}


def killed_at(touch: int, work: Callable[[], Any]) -> bool:
    """Do the work in another process that dies in front of its n-th touch of the disk. Did it die?"""
    child = os.fork()
    if child == 0:
        left = touch

        def die(_: Any, event: str, called: Any) -> None:
            nonlocal left
            if event == "c_call" and called.__name__ in TOUCHES:
                if left == 0:
                    os._exit(9)
                left -= 1

        sys.setprofile(die)
        work()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
