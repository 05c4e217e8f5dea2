"""ONNX Runtime sessions as a cascade needs them: many in series, none slowing the next.

Measured on 2 cores: with default spinning a chain of six sessions is 1.2-1.7 times slower than one and
starves everything else; with separate arenas it is up to 1.17 times slower than one, because every
session walks its own cold memory. So: explicit thread counts, one arena for all, and threads that wait awake for
the next operation of a run, not for the next run: spinning for 50 microseconds and no more took a chain of six blocks
from 1.35 of one session's time to 1.06 at batch 1, and to 0.86 at batch 8.

A graph of the whole network has no next session to get in the way of, and there it depends on the traffic (three-exit
CNN of 82 MFLOP, MiniLM; 2 cores, medians). One row right after another: 20 microseconds take 0.81 and 2.8 ms, more
gains nothing, none takes 0.87 and 3.6. One row every 20 ms: threads that sleep take 1.7 and 4.9 ms, those that spin 20
microseconds 1.8 and 5.4, 200 microseconds 2.3 and 7.0, for they are woken late and are in the way until then. So it is
the caller's to say, and sleeping unless he does.
"""

import ctypes
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any
from weakref import WeakSet

from offramp.runtime.arrays.cores import usable_cores
from offramp.runtime.bundle import Bundle
from offramp.runtime.errors import BundleError, InputError, RuntimeUnavailable
from offramp.runtime.execution.calls import Calls
from offramp.runtime.execution.cpu.memory import release_mapped

_INSTALL = "pip install onnxruntime (or onnxruntime-gpu on a machine with CUDA)"
CPU = ["CPUExecutionProvider"]
_PROVIDERS = {"cpu": CPU, "cuda": ["CUDAExecutionProvider", *CPU]}

# 20 and 100 microseconds measured alike, 300 already gets in the way of the next session.
_SPIN_IN_A_CHAIN = 50
_MOST_SPIN = 1_000_000
AWAKE = 20
"""Microseconds that threads of a whole graph wait awake where one batch follows on the other: more gains nothing."""

_arena_lock = threading.Lock()
_arena_process: int | None = None


def onnxruntime() -> Any:
    """The one installed ONNX Runtime module.

    Raises RuntimeUnavailable with the command that repairs it if there is none, or if onnxruntime and
    onnxruntime-gpu, two distributions of one module, have overwritten each other.
    """
    installed = []
    for name in ("onnxruntime", "onnxruntime-gpu"):
        try:
            metadata.version(name)
            installed.append(name)
        except metadata.PackageNotFoundError:
            pass
    if len(installed) == 2:
        raise RuntimeUnavailable(
            "onnxruntime and onnxruntime-gpu are both installed and overwrite each other. Run: "
            "pip uninstall -y onnxruntime onnxruntime-gpu && pip install onnxruntime-gpu"
            " (or onnxruntime, for CPU only)"
        )
    try:
        import onnxruntime
    except ImportError as error:
        raise RuntimeUnavailable(f"ONNX Runtime isn't installed. Run: {_INSTALL}") from error
    return onnxruntime


def available_threads() -> int:
    """CPUs this process may use, which ONNX Runtime, heeding no quota, doesn't find by itself."""
    return usable_cores()


def check_threads(threads: int) -> None:
    """Raises InputError for a number of threads that can't be meant: each session starts that many."""
    most = max(64, 4 * (os.cpu_count() or 1))
    if not isinstance(threads, int) or isinstance(threads, bool) or not 1 <= threads <= most:
        raise InputError(f"threads is {threads!r}, expected a whole number from 1 to {most}.")


def check_spin(spin_us: Any) -> None:
    """Raises InputError for microseconds that can't be meant."""
    if not isinstance(spin_us, int) or isinstance(spin_us, bool) or not 0 <= spin_us <= _MOST_SPIN:
        raise InputError(f"spin_us is {spin_us!r}, expected whole microseconds from 0 to {_MOST_SPIN}.")


def resolve_providers(device: str, providers: Sequence[Any] | None) -> list[Any]:
    """The execution providers for a device, or the caller's own, checked against what is installed."""
    if device not in _PROVIDERS:
        raise InputError(f"device is {device!r}, expected one of {sorted(_PROVIDERS)}.")
    if isinstance(providers, str):
        raise InputError(f"providers is {providers!r}, expected a list of names.")
    wanted = list(providers) if providers is not None else _PROVIDERS[device]
    there = onnxruntime().get_available_providers()
    for provider in wanted:
        name = provider[0] if isinstance(provider, tuple) else provider
        if name not in there:
            raise RuntimeUnavailable(
                f"the installed ONNX Runtime has no {name}, only {there}. "
                "For CUDA: pip uninstall -y onnxruntime && pip install onnxruntime-gpu"
            )
    return wanted


def use_shared_arena() -> bool:
    """Register the process-wide CPU arena once. False in a forked child, whose copy may be locked for ever."""
    global _arena_process
    ort = onnxruntime()
    with _arena_lock:
        if _arena_process is None:
            memory = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
            # Somebody else in this process may have registered one already: then that one is shared.
            try:
                ort.create_and_register_allocator(memory, None)
            except Exception as error:
                if "already" not in str(error).lower():
                    return False
            _arena_process = os.getpid()
        return _arena_process == os.getpid()


def can_spin_briefly(version: str) -> bool:
    """Whether this ONNX Runtime knows spin_duration_us; older ones ignore it and spin for milliseconds."""
    major, minor = (int(part) for part in version.split(".")[:2])
    return (major, minor) >= (1, 27)


def open_session(
    path: Path,
    *,
    threads: int,
    providers: list[Any],
    spin_us: int = _SPIN_IN_A_CHAIN,
    packed: bool = True,
    where: Path | None = None,
) -> Any:
    """An onnxruntime.InferenceSession over one graph of a bundle, with settings fit for a chain of them.

    spin_us: microseconds that its threads wait awake for the next operation. packed: False leaves the weights as they
    lie in the file, which holds them once instead of twice and runs slower. where: what errors call the file.
    """
    ort = onnxruntime()
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    if spin_us and can_spin_briefly(ort.__version__):
        options.add_session_config_entry("session.intra_op.spin_duration_us", str(spin_us))
    else:
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if not packed:
        options.add_session_config_entry("session.disable_prepacking", "1")
    options.log_severity_level = 4  # failures are raised; ONNX Runtime's copy on stderr adds nothing
    options.enable_mem_pattern = False
    if use_shared_arena():
        options.add_session_config_entry("session.use_env_allocators", "1")
    try:
        session = ort.InferenceSession(str(path), options, providers=providers)
    except Exception as error:
        raise BundleError(f"{where or path}: ONNX Runtime can't load it: {error}") from error
    names = [provider[0] if isinstance(provider, tuple) else provider for provider in providers]
    unused = [name for name in names if name not in session.get_providers()]
    if unused:  # it goes on without them, on the CPU in the end
        raise RuntimeUnavailable(
            f"ONNX Runtime can't use {', '.join(unused)} here, only {session.get_providers()}: "
            "is there a GPU, and do its driver, CUDA and cuDNN fit this onnxruntime-gpu? Or use device='cpu'."
        )
    return session


_owners: "WeakSet[Any]" = WeakSet()


def keep_in_children(owner: Any) -> None:
    """Have what owns sessions stay alive in forked children, to their very end.

    A session waits for its threads when it is destroyed, and a child has none of them: it would wait for ever, at
    `close`, at `del` or at its exit.
    """
    _owners.add(owner)


def _never_destroy() -> None:
    owners = list(_owners)
    for owner in owners:
        getattr(owner, "ready", {}).clear()  # the short way's sessions
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(owner))  # one reference that nobody gives back, not even the exit
    if owners:
        # ONNX Runtime's own environment waits for threads, too, when the C library ends the process. What is
        # registered last runs first: the child ends there, with its exit code, once Python has finished.
        with suppress(AttributeError, OSError):
            libc = ctypes.CDLL(None)
            libc.on_exit(libc._exit, None)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_never_destroy)

RunSession = Callable[[list[str], Mapping[str, Any]], list[Any]]


def bare_run(session: Any) -> RunSession:
    """A session's run without its Python wrapper, which checks again what we have checked: 20 us a block."""
    inner = getattr(session, "_sess", None)
    if inner is None or not hasattr(inner, "run"):
        return lambda outputs, feed: list(session.run(outputs, feed))
    run = inner.run
    return lambda outputs, feed: run(outputs, feed, None)


class Sessions:
    """The sessions of one bundle, opened when first needed and shared by every cascade made from it.

    ready: what is open, for calls of one run that can't wait for more; empty once it is closed, or in a fork.
    """

    def __init__(
        self, bundle: Bundle, *, threads: int, providers: list[Any], spin_us: int = 0, packed: bool = True
    ) -> None:
        """spin_us: microseconds that threads of a graph of the whole network wait awake for the next operation.

        packed: see `open_session`.
        """
        self._bundle = bundle
        self._spin_us = spin_us
        self._packed = packed
        self._threads = threads
        self._providers = providers
        self._open: dict[str, RunSession] | None = {}
        self.ready: dict[str, RunSession] = {}  # those that are open, for calls of one run; empty once closed or forked
        self._lock = threading.Lock()
        self.calls = Calls(self._let_go)
        keep_in_children(self)

    @property
    def opened(self) -> frozenset[str]:
        """Files of the graphs that are open."""
        return frozenset(self._open or ())

    @property
    def fingerprint(self) -> str:
        """What decides an answer's last bits beside the graphs: library, providers and threads."""
        return f"onnxruntime {onnxruntime().__version__}, {self._providers}, {self._threads} threads"

    def get(self, file: str) -> RunSession:
        """Runs one of the bundle's graphs: (output names, inputs by name) -> outputs.

        Raises CascadeClosed after close(), or in a forked child, whose copies of the threads don't run.
        """
        opened = self._open
        if opened is None or self.calls.forked:
            raise self.calls.refusal()
        session = opened.get(file)
        if session is None:
            with self._lock:
                session = opened.get(file)
                if session is None:
                    alone = self._is_whole(file)
                    session = opened[file] = bare_run(
                        open_session(
                            self._bundle.file(file),
                            threads=self._threads,
                            providers=self._providers,
                            spin_us=self._spin_us if alone else _SPIN_IN_A_CHAIN,
                            packed=self._packed,
                            where=self._bundle.path / file,
                        )
                    )
                    self.ready[file] = session
                    if self.calls.closing:
                        self.ready.clear()
                    if alone and self._packed:  # outer graphs let go by themselves of what they have packed
                        release_mapped(self._bundle.folder)
        return session

    def _is_whole(self, file: str) -> bool:
        """Whether a graph has all the blocks in it, so that none follows on its run."""
        manifest = self._bundle.manifest
        whole = {s.file for s in manifest.segments if (s.first, s.last) == (0, len(manifest.blocks) - 1)}
        return file in whole or (manifest.cascade is not None and file in manifest.cascade.files)

    def close(self) -> None:
        """Take no more calls, and let go of the sessions when the last one has ended."""
        self.calls.close()
        self.ready.clear()

    def _let_go(self) -> None:
        self._open = None
