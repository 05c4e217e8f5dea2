"""One family of errors: each says where, what, and what to do about it."""


class OfframpError(Exception):
    """Base of everything offramp raises on purpose. The CLI prints it as one line and exits 2."""


class BundleError(OfframpError):
    """A bundle, its manifest or its calibration can't be trusted or understood."""


class InputError(OfframpError, ValueError):
    """What a caller handed in doesn't fit: a name, dtype, shape, value or option."""


class ExportError(OfframpError):
    """A model can't be turned into a bundle, or the bundle didn't pass its own verification."""


class RuntimeUnavailable(OfframpError):
    """No usable ONNX Runtime (none, two at once, or one that lacks the device that was asked for)."""


class StoreError(OfframpError):
    """The store of served rows can't be opened, read or written now: it says which, and why."""


class NotLeader(StoreError):
    """Another engine leads, or somebody decided first: read the state again before deciding anew."""


class CascadeClosed(OfframpError, RuntimeError):
    """A cascade was used after close(), or in a process other than the one that loaded it."""


class Stopped(OfframpError):
    """A call ended before its answer because whoever made it said so."""


class OutputLost(OfframpError):
    """What a command prints couldn't be written; what it did before stands. The CLI exits 1."""

    def __init__(self, why: str) -> None:
        super().__init__(f"the output couldn't be written ({why}); what the command did before that stands.")


# PyPI's torch for Linux is a CUDA build of several gigabytes, and whatever depends on torch would bring it.
_TORCH = "pip install torch --index-url https://download.pytorch.org/whl/cpu && "
_NEEDS_TORCH = {"all", "export"}


def how_to_install(extra: str) -> str:
    """A sentence with the command that brings an optional part. offramp is on no index: it is run in a clone."""
    first = _TORCH if extra in _NEEDS_TORCH else ""
    return f'In offramp\'s clone run: {first}pip install ".[{extra}]"'
