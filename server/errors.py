"""Every error a client can get, and the status that says whose turn it is. Who speaks no HTTP raises them, too."""

import math

from offramp.runtime.errors import CascadeClosed, InputError, OfframpError

SHUTTING_DOWN = "the server is shutting down."


class ServerError(OfframpError):
    """An answer other than 200. `outcome` is how the request is counted in requests_total."""

    status = 500
    outcome = "error"
    headers: dict[str, str] = {}  # noqa: RUF012 (never mutated; instances replace it)


class NotFound(ServerError):
    status = 404
    outcome = "invalid"


class TooLarge(ServerError):
    """More bytes or rows than this server ever takes in one request."""

    status = 413
    outcome = "too_large"


class QueueFull(ServerError):
    """More rows wait, or more bytes are held, than allowed; the same request may well succeed later."""

    status = 429
    outcome = "rejected"

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.headers = {"Retry-After": str(max(1, math.ceil(retry_after)))}


class Conflict(ServerError):
    """Somebody else decided first."""

    status = 409
    outcome = "rejected"


class NotSupported(ServerError):
    """A part of a protocol that this server doesn't speak."""

    status = 501
    outcome = "unsupported"


class Unavailable(ServerError):
    """The server is starting or draining."""

    status = 503
    outcome = "unavailable"
    headers = {"Retry-After": "1"}  # noqa: RUF012


class DeadlinePassed(ServerError):
    """The request's timeout passed before its answer was there."""

    status = 503
    outcome = "timeout"


class ClientGone(ServerError):
    """The client hung up; nobody reads this answer."""

    status = 499
    outcome = "cancelled"


def outcome(error: BaseException) -> str:
    """How a failed request is counted."""
    if isinstance(error, ServerError):
        return error.outcome
    if isinstance(error, InputError):
        return "invalid"
    return "unavailable" if isinstance(error, CascadeClosed) else "error"
