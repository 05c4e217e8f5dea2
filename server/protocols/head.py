"""HEAD wherever there is a GET: monitors and load balancers ask so."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class Heads:
    """Answers HEAD as the GET of the same path, without its body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def allowed(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 405:
                message["headers"] = [_with_head(*header) for header in message.get("headers", ())]
            await send(message)

        if scope["method"] != "HEAD":
            await self._app(scope, receive, allowed)
            return

        async def bodiless(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        await self._app({**scope, "method": "GET"}, receive, bodiless)


def _with_head(name: bytes, value: bytes) -> tuple[bytes, bytes]:
    methods = [one.strip() for one in value.split(b",")]
    if name.lower() == b"allow" and b"GET" in methods and b"HEAD" not in methods:
        value += b", HEAD"
    return name, value
