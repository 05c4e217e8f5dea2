"""The process that decodes: `python -m offramp.server.decoding`, started by a server, which it doesn't outlive."""

import gc
import math
import os
import signal
import sys
from contextlib import suppress
from io import FileIO
from pathlib import Path

from offramp.runtime.errors import InputError
from offramp.server.decoding.frames import YES, Needs, Refused, Setup, Work, fill, receive, send, send_asked
from offramp.server.errors import NotSupported, QueueFull, TooLarge
from offramp.server.patience import Patience
from offramp.server.protocols.json_body import Body
from offramp.server.protocols.reading import READERS

_SPARE = 64 * 2**10  # bytes asked for beforehand: a body is unpacked piece by piece, and not each is worth the question
_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")


class AskedHold:
    """What the request holds is counted by the server, which is asked before more is made."""

    def __init__(self, requests: FileIO, answers: FileIO) -> None:
        self._requests = requests
        self._answers = answers
        self._granted = 0

    def set(self, size: int) -> None:
        if size <= self._granted:
            return
        self._granted = size + _SPARE
        send(self._answers, Needs(self._granted))
        granted = bytearray(1)
        fill(self._requests, granted)
        if granted != YES:
            raise QueueFull("there is no room for it.", 1.0)


def work(requests: FileIO, answers: FileIO, setup: Setup, asked: Work) -> None:
    """Read one body and send what it asks for, or what is wrong with it."""
    data = bytearray(asked.size)
    fill(requests, data)
    # Whoever doesn't want to wait any more ends this process.
    body = Body([data], asked.encoding, AskedHold(requests, answers), Patience(math.inf))
    try:
        made = READERS[asked.kind](body, setup.manifest, setup.limits)
    except QueueFull:
        return  # the server knows
    except (InputError, NotSupported, TooLarge) as error:
        send(answers, Refused(type(error).__name__, str(error)))
        return
    body.drop()
    send_asked(answers, made)


def bound_memory(more: int) -> None:
    """No more than that beside what is taken already; where that can be said."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = taken + more if hard == resource.RLIM_INFINITY else min(taken + more, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def main() -> None:
    for name in _SIGNALS:  # they may be sent to a whole group, and the server drains first: this ends when it has ended
        with suppress(AttributeError):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    gc.disable()  # it would go through millions of lists while they are made, and none of them is in a circle
    requests, answers = FileIO(os.dup(0), "r"), FileIO(os.dup(1), "w")
    os.dup2(2, 1)  # what anybody prints isn't a message
    with suppress(EOFError, BrokenPipeError):
        setup: Setup = receive(requests, Setup)
        bound_memory(setup.memory)
        while True:
            work(requests, answers, setup, receive(requests, Work))


if __name__ == "__main__":
    try:
        main()
    except MemoryError:
        sys.exit("offramp: a body took more memory to decode than its limits allow; its decoder ends.")
