"""The pages for people: what is happening now, and the documentation. Nothing in them comes from elsewhere."""

from importlib import resources

from fastapi import APIRouter
from offramp.server.errors import NotFound
from starlette.responses import Response

_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_HEADERS = {"Content-Security-Policy": "default-src 'self'", "X-Content-Type-Options": "nosniff"}


def _files() -> dict[str, tuple[bytes, str]]:
    """The static files by name: few and small, so they are kept. The look is that of the jobs' pages."""
    own = resources.files("offramp.server") / "static"
    look = resources.files("offramp.runtime") / "jobs" / "pages" / "look.css"
    return {
        file.name: (file.read_bytes(), _TYPES[suffix])
        for file in [*own.iterdir(), look]
        if (suffix := "." + file.name.rpartition(".")[2]) in _TYPES
    }


def routes() -> APIRouter:
    router = APIRouter(include_in_schema=False)
    files = _files()

    def page(name: str) -> Response:
        if name not in files:
            raise NotFound(f"no such file: {name}.")
        content, media_type = files[name]
        return Response(content, headers=_HEADERS, media_type=media_type)

    @router.get("/")
    async def live() -> Response:
        return page("live.html")

    @router.get("/try")
    async def try_one() -> Response:
        return page("try.html")

    @router.get("/docs")
    async def docs() -> Response:
        return page("docs.html")

    @router.get("/favicon.ico")  # what browsers ask for beside documents that name no icon, such as /metrics
    async def icon() -> Response:
        return page("icon.svg")

    @router.get("/static/{name}")
    async def static(name: str) -> Response:
        return page(name)

    return router
