"""Every error a client can get: one JSON shape, and the status that says whose turn it is.

The shape is `{"error": "…", "request_id": "…"}`.
"""

import math

import msgspec
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from offramp.runtime.errors import CascadeClosed, InputError, OfframpError
from offramp.server.request_id import HEADER, id_of
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response


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


def error_response(request: Request, status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    name = id_of(request)
    body = msgspec.json.encode({"error": message, "request_id": name})
    return Response(body, status, {**(headers or {}), HEADER: name}, media_type="application/json")


def add_error_handlers(app: FastAPI) -> None:
    """Give every error of the app, its routing's own included, the one shape."""

    async def server_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ServerError)
        return error_response(request, error.status, str(error), error.headers)

    async def input_error(request: Request, error: Exception) -> Response:
        return error_response(request, 400, str(error))

    async def closed(request: Request, error: Exception) -> Response:
        return error_response(request, 503, str(error))

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = {
            404: f"no such path: {request.url.path}. See {request.scope.get('root_path', '')}/docs.",
            405: f"{request.method} is not allowed for {request.url.path}.",
        }.get(error.status_code, str(error.detail))
        return error_response(request, error.status_code, message, dict(error.headers or {}))

    async def unexpected(request: Request, error: Exception) -> Response:
        # The details are in the log; what a stranger is told says nothing about this machine.
        return error_response(request, 500, f"internal error ({type(error).__name__}).")

    app.add_exception_handler(ServerError, server_error)
    app.add_exception_handler(InputError, input_error)
    app.add_exception_handler(RequestValidationError, input_error)
    app.add_exception_handler(CascadeClosed, closed)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(Exception, unexpected)
