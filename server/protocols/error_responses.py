"""Every error as a response of one shape: `{"error": "…", "request_id": "…"}`."""

import msgspec
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from offramp.runtime.errors import CascadeClosed, InputError
from offramp.server.errors import ServerError
from offramp.server.request_id import HEADER, id_of
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response


def error_response(request: Request, status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    name = id_of(request)
    body = msgspec.json.encode({"error": message, "request_id": name})
    return Response(body, status, {**(headers or {}), HEADER: name}, media_type="application/json")


EXPECTED = (ServerError, InputError, RequestValidationError, CascadeClosed)
"""What is raised on purpose, here or below."""


def response_to(request: Request, error: Exception) -> Response:
    """The answer for anything that was raised, but for what routing raises."""
    if isinstance(error, ServerError):
        return error_response(request, error.status, str(error), error.headers)
    if isinstance(error, EXPECTED):
        return error_response(request, 503 if isinstance(error, CascadeClosed) else 400, str(error))
    # The details are in the log; what a stranger is told says nothing about this machine.
    return error_response(request, 500, f"internal error ({type(error).__name__}).")


def add_error_handlers(app: FastAPI) -> None:
    """Give every error of the app, its routing's own included, the one shape."""

    async def expected(request: Request, error: Exception) -> Response:
        return response_to(request, error)

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = {
            404: f"no such path: {request.url.path}. See {request.scope.get('root_path', '')}/docs.",
            405: f"{request.method} is not allowed for {request.url.path}.",
        }.get(error.status_code, str(error.detail))
        headers = dict(error.headers or {})
        allowed = headers.get("Allow", "").split(", ")
        if "GET" in allowed and "HEAD" not in allowed:  # see `Heads`
            headers["Allow"] += ", HEAD"
        return error_response(request, error.status_code, message, headers)

    for kind in EXPECTED:
        app.add_exception_handler(kind, expected)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(Exception, expected)
