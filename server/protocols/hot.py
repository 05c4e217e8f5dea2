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


class Answered(Response):
    """A JSON body with status 200, without looking at what headers it might have."""

    def __init__(self, body: bytes) -> None:
        self.body = body
        self.status_code, self.background = 200, None
        self.raw_headers = [(b"content-length", b"%d" % len(body)), (b"content-type", b"application/json")]


def add_hot_routes(app: FastAPI, routes: Mapping[str, Handler]) -> None:
    """Put them in front of an app. Whatever is added to it afterwards is for them too: then they go its way."""
    before, handlers = list(app.user_middleware), dict(app.exception_handlers)
    build = app.build_middleware_stack

    def as_made() -> bool:
        return app.user_middleware == before and app.exception_handlers == handlers and not app.root_path

    def stack() -> ASGIApp:
        return HotRoutes(build(), routes) if as_made() else build()

    app.build_middleware_stack = stack  # type: ignore[method-assign]
    # An app that this one is mounted in may have its state.
    app.state.in_front = lambda asked: HotRoutes(app, routes) if asked is app and as_made() else asked


def in_front(app: FastAPI) -> ASGIApp:
    """An app of `create_app`'s for a server of our own: its hot routes come before all that FastAPI does."""
    made: ASGIApp = app.state.in_front(app)
    return made
