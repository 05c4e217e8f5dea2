"""A name for each request: in its answer's header, in every error, and in the log."""

import logging
import re
from collections.abc import Mapping
from typing import Any

from offramp.runtime.online.names import new_name
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "X-Request-ID"
_HEADER = HEADER.lower().encode()
_KEY = "offramp.request_id"
# What a client names itself goes into headers and the log as it is, so it may hold nothing that means something there,
# or on a page that shows it. Base64 and paths pass; it may be as long as a label may name it.
_SANE = re.compile(r"[A-Za-z0-9._:/+=@~-]{1,200}")
_log = logging.getLogger("uvicorn.error.offramp")


class RequestIds:
    """Gives each request the id that its client chose, or one of its own."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        name = scope[_KEY] = _given(scope) or new_name()
        header = (_HEADER, name.encode())

        async def tagged(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = message.setdefault("headers", [])
                headers[:] = [*(other for other in headers if other[0].lower() != _HEADER), header]
                _log.info("request %s: %s %s %d", name, scope["method"], scope["path"], message["status"])
            await send(message)

        try:
            await self._app(scope, receive, tagged)
        except Exception as error:
            _log.error("request %s: %s %s: %s", name, scope["method"], scope["path"], type(error).__name__)
            raise


def _given(scope: Scope) -> str:
    """The name that the client chose, "" if it is none that may be said again."""
    for header, value in scope["headers"]:
        if header == _HEADER:
            name: str = value.decode("latin-1")
            return name if _SANE.fullmatch(name) else ""
    return ""


def id_of(request: Request) -> str:
    return id_in(request.scope)


def id_in(scope: Mapping[str, Any]) -> str:
    """The name of a scope's request, "" if it was given none."""
    name: str = scope.get(_KEY, "")
    return name
