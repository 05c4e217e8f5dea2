"""offramp.server: FastAPI over the runtime."""

from offramp.server.app import create_app
from offramp.server.engine import Engine
from offramp.server.settings import Settings

__all__ = ["Engine", "Settings", "create_app"]
