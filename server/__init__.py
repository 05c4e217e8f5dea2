"""offramp.server: FastAPI over the runtime."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offramp.server.app import create_app
    from offramp.server.engine import Engine
    from offramp.server.settings import Settings

__all__ = ["Engine", "Settings", "create_app"]


def __getattr__(name: str) -> Any:
    # When asked for: the process that decodes bodies is a module of this package, and would load all of FastAPI.
    if name == "create_app":
        from offramp.server.app import create_app

        return create_app
    if name == "Engine":
        from offramp.server.engine import Engine

        return Engine
    if name == "Settings":
        from offramp.server.settings import Settings

        return Settings
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
