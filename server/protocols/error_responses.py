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
