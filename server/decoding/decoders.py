"""The server's side of its decoders: started when the first large body comes, kept, ended with the request they serve
if nobody waits for it any more."""

import asyncio
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from io import FileIO
from typing import cast

from offramp.runtime.bundle import Manifest
from offramp.runtime.errors import InputError, OfframpError
from offramp.server.decoding.frames import (
    NO,
    YES,
    Needs,
    Refused,
    Reply,
    Setup,
    Work,
    receive,
    receive_asked,
    send,
    send_bytes,
)
from offramp.server.errors import SHUTTING_DOWN, NotSupported, TooLarge, Unavailable
from offramp.server.protocols.json_body import Body
from offramp.server.protocols.reading import Asked, Limits

# Decoding takes memory of its own: more at a time would only do it more often.
_MOST = 2
_PIPE = 2**20  # bytes that wait in a pipe, where the system lets us say so
_ITS_OWN = 128 * 2**20  # bytes of address space beside what bodies and their values take
_ERRORS: dict[str, type[OfframpError]] = {kind.__name__: kind for kind in (InputError, NotSupported, TooLarge)}


class Decoder:
    """One process. One thread at a time uses it; any may end it."""

    def __init__(self, setup: Setup) -> None:
        self._process = subprocess.Popen(
            # -P: a numpy.py in the working folder isn't ours.
            [sys.executable, "-P", "-m", "offramp.server.decoding"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            pipesize=_PIPE,
            start_new_session=True,  # a terminal's Ctrl-C is for the server
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
        )
        self._requests, self._answers = cast(FileIO, self._process.stdin), cast(FileIO, self._process.stdout)
        with suppress(OSError):  # if it has ended already, who asks it is told
            send(self._requests, setup)

    @property
    def lives(self) -> bool:
        return self._process.poll() is None

    def read(self, kind: str, body: Body) -> Asked:
        """What a body asks for; its bytes are given away. Raises what READERS raise, and Unavailable if it ends."""
        try:
            return self._read(kind, body)
        except (OSError, EOFError) as error:
            raise Unavailable("the process that decodes large bodies has ended in between. Try again.") from error

    def _read(self, kind: str, body: Body) -> Asked:
        send(self._requests, Work(kind, body.encoding, body.size))
        for piece in body.pieces:
            send_bytes(self._requests, piece)
        body.drop()
        while True:
            reply: Reply = receive(self._answers, Reply)
            if isinstance(reply, Needs):
                try:
                    body.held.set(reply.bytes)
                except OfframpError:
                    send_bytes(self._requests, NO)
                    raise
                send_bytes(self._requests, YES)
            elif isinstance(reply, Refused):
                raise _ERRORS[reply.error](reply.message)
            else:
                return receive_asked(self._answers, reply)

    def end(self) -> None:
        """At once, whatever it does."""
        self._process.kill()

    def close(self) -> None:
        """End it, and wait for that."""
        self.end()
        self._process.wait()
        self._requests.close()
        self._answers.close()


class Decoders:
    """As many as may decode at a time. A body that comes while all are at work waits for its turn."""

    def __init__(self, manifest: Manifest, limits: Limits) -> None:
        # Numbers exist as values, and up to twice as arrays, which are smaller; a body packed and unpacked.
        memory = 2 * (limits.body_bytes + limits.decoded_bytes) + _ITS_OWN
        self._setup = Setup(manifest, limits, memory)
        self._threads = ThreadPoolExecutor(_MOST, thread_name_prefix="offramp-decoder")
        self._change = threading.Lock()  # guards everything below
        self._idle: list[Decoder] = []
        self._busy: set[Decoder] = set()
        self._open = True

    @property
    def busy(self) -> int:
        """Processes that are at a body."""
        return len(self._busy)

    async def read(self, kind: str, body: Body) -> Asked:
        """What a body asks for. Cancelling the call ends the process that is at it."""
        turn = _Turn()
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, self._take_turn, turn, kind, body)
        except asyncio.CancelledError:
            turn.give_up()
            raise

    def close(self) -> None:
        """End all processes, and whatever they do."""
        with self._change:
            self._open = False
            idle, self._idle = self._idle, []
            for decoder in self._busy:
                decoder.end()
        for decoder in idle:
            decoder.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _take_turn(self, turn: "_Turn", kind: str, body: Body) -> Asked:
        body.patience.check()  # it may have waited for its thread
        decoder = self._take()
        fit = False
        try:
            turn.begin(decoder)
            asked = decoder.read(kind, body)
            fit = True
            return asked
        except OfframpError as error:
            fit = not isinstance(error, Unavailable)
            raise
        finally:
            self._give_back(decoder, fit=not turn.end() and fit)

    def _take(self) -> Decoder:
        with self._change:
            while self._idle:
                decoder = self._idle.pop()
                if decoder.lives:
                    break
                decoder.close()
            else:
                if not self._open:
                    raise Unavailable(SHUTTING_DOWN)
                decoder = Decoder(self._setup)
            self._busy.add(decoder)
            return decoder

    def _give_back(self, decoder: Decoder, *, fit: bool) -> None:
        with self._change:
            self._busy.discard(decoder)
            if fit and self._open:
                self._idle.append(decoder)
                return
        decoder.close()


class _Turn:
    """A request at its decoder. Who gives it up ends the process, but never one that is at the next request."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._decoder: Decoder | None = None
        self._over = False

    def begin(self, decoder: Decoder) -> None:
        with self._lock:
            self._decoder = decoder
            if self._over:
                decoder.end()

    def end(self) -> bool:
        """Whether it was given up before it was done."""
        with self._lock:
            self._decoder = None
            return self._over

    def give_up(self) -> None:
        with self._lock:
            self._over = True
            if self._decoder is not None:
                self._decoder.end()
