"""Models whose names aren't one segment of a URL: "org/model", or an empty version.

Clients don't escape the slash, and where one does, it is a slash again before anything here sees it.
"""

from urllib.parse import quote

from offramp.runtime.bundle import Manifest
from starlette.types import ASGIApp, Receive, Scope, Send

_MODELS, _VERSIONS = "/v2/models/", "/versions/"


class Names:
    """Makes one segment each of the model's name and version, where they stand in a path and are none."""

    def __init__(self, app: ASGIApp, manifest: Manifest) -> None:
        self._app = app
        self._name, self._version = manifest.name, manifest.version
        self._plain = all(text and "/" not in text for text in (self._name, self._version))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._plain:
            path, root = scope["path"], scope.get("root_path", "")
            mounted = len(root) if path.startswith(root) else 0
            scope = {**scope, "path": path[:mounted] + self._segmented(path[mounted:])}
        await self._app(scope, receive, send)

    def _segmented(self, path: str) -> str:
        behind = _behind(path, _MODELS, self._name)
        if behind is None:
            return path
        further = _behind(behind, _VERSIONS, self._version)
        if further is not None:
            behind = f"{_VERSIONS}{segment(self._version)}{further}"
        return f"{_MODELS}{segment(self._name)}{behind}"


def segment(text: str) -> str:
    """A name as one segment, which is never empty."""
    return quote(text, safe="") or "%"


def _behind(path: str, before: str, name: str) -> str | None:
    """What follows a name that stands behind something at a path's beginning, None if it doesn't stand there."""
    start = before + name
    return path[len(start) :] if path == start or path.startswith(start + "/") else None
