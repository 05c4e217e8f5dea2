"""What a server that keeps nothing answers where labels would go."""

from fastapi import APIRouter
from offramp.server.errors import NotSupported
from starlette.responses import Response


def refusals() -> APIRouter:
    """The same paths on a server that keeps nothing."""
    router = APIRouter(tags=["recalibration"], include_in_schema=False)

    @router.api_route("/v1/feedback", methods=["POST"])
    @router.api_route("/v1/feedback/{rest:path}", methods=["DELETE"])
    @router.api_route("/v1/recalibration", methods=["GET"])
    @router.api_route("/v1/recalibration/{rest:path}", methods=["POST"])
    async def refuse() -> Response:
        raise NotSupported(
            "this server keeps no answered rows: start it with --recalibration PATH, or OFFRAMP_RECALIBRATION."
        )

    return router
