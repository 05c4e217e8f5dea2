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


class CascadeClosed(OfframpError, RuntimeError):
    """A cascade was used after close(), or in a process other than the one that loaded it."""
