"""Which connection a server has: the fastest that is installed."""

from collections.abc import Callable
from typing import Any

from offramp.server.connections.h11_connection import H11Connection


def connection() -> Callable[..., Any]:
    """httptools', which has no wheel for every platform, or h11's."""
    try:
        from offramp.server.connections.httptools_connection import HttpToolsConnection
    except ImportError:
        return H11Connection
    return HttpToolsConnection
