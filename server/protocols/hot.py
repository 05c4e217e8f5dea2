"""The two routes that nearly all requests are for, without the way through all others.

FastAPI has them as well: for the documentation, for every other method, and wherever an app isn't as offramp made it.
"""

from collections.abc import Awaitable, Callable, Mapping

from fastapi import FastAPI
from offramp.server.protocols.error_responses import EXPECTED, response_to
from offramp.server.request_id import RequestIds
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

Handler = Callable[[Request], Awaitable[Response]]


class HotRoutes:
    """Answers POST at some paths, and leaves the rest to an app."""

    def __init__(self, app: ASGIApp, routes: Mapping[str, Handler]) -> None:
        self._app = app
        self._routes = routes
        self._named = RequestIds(self._answer)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # An app that is mounted somewhere has other paths, which FastAPI works out.
        here = scope["type"] == "http" and scope["method"] == "POST" and not scope.get("root_path")
        await (self._named if here and scope["path"] in self._routes else self._app)(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            response = await self._routes[scope["path"]](request)
        except EXPECTED as error:
            response = response_to(request, error)
        except Exception as error:
            await response_to(request, error)(scope, receive, send)
            raise  # for the log
        await response(scope, receive, send)


def add_hot_routes(app: FastAPI, routes: Mapping[str, Handler]) -> None:
    """Put them in front of an app. Whatever is added to it afterwards is for them too: then they go its way."""
    before, handlers = list(app.user_middleware), dict(app.exception_handlers)
    build = app.build_middleware_stack

    def stack() -> ASGIApp:
        as_made = app.user_middleware == before and app.exception_handlers == handlers and not app.root_path
        return HotRoutes(build(), routes) if as_made else build()

    app.build_middleware_stack = stack  # type: ignore[method-assign]
