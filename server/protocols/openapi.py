"""OpenAPI for bodies that are decoded by us: their schemas come from the structs that decode them."""

import math
from typing import Any

import msgspec
import numpy as np
from fastapi import FastAPI
from offramp.runtime.bundle import Input
from starlette.responses import Response

_LARGEST_EXAMPLE = 2**18  # numbers; more are only hinted at: every visitor of the page loads them
_REFERENCE = "#/components/schemas/{name}"
_ERRORS = {
    400: "The request is wrong; the error names the field and what was expected",
    404: "No such model or path",
    413: "More bytes or rows than this server takes at a time",
    429: "Too many rows wait; Retry-After says when to come again",
    501: "A part of the protocol that isn't spoken here",
    503: "The timeout passed, or the server is shutting down",
}


class Error(msgspec.Struct):
    """What every error looks like."""

    error: str
    request_id: str


def documented(request: type[Any] | None, response: type[Any], example: Any = None) -> dict[str, Any]:
    """Arguments for a route: the schemas of its bodies, and a request that works as it stands.

    request: None for a route that takes no body.
    """
    body: dict[str, Any] = {}
    if request is not None:
        content = {"application/json": {"schema": _reference(request), "example": example}}
        body = {"openapi_extra": {"requestBody": {"required": True, "content": content}}}
    return {
        **body,
        "responses": {
            200: {"description": "The answer", "content": {"application/json": {"schema": _reference(response)}}},
            **{
                status: {"description": text, "content": {"application/json": {"schema": _reference(Error)}}}
                for status, text in _ERRORS.items()
            },
        },
        "response_class": Response,
    }


def example_row(given: Input) -> Any:
    """Zeros, or whatever stands for them, in the shape of one row of an input; ones where numbers are whole: a mask."""
    sizes = [size if isinstance(size, int) else 3 for size in given.shape if size != "batch"]
    if math.prod(sizes) > _LARGEST_EXAMPLE:
        sizes = [1] * len(sizes)
    whole = np.dtype(given.dtype).kind in "iu"
    return np.full(sizes, whole, given.dtype).tolist()


def _reference(struct: type[Any]) -> dict[str, str]:
    return {"$ref": _REFERENCE.format(name=struct.__name__)}


def add_schemas(app: FastAPI, structs: list[type[Any]]) -> None:
    """Put the structs that routes refer to into the app's OpenAPI document."""
    _, components = msgspec.json.schema_components([*structs, Error], ref_template=_REFERENCE)
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        document = plain()
        document["components"] = {"schemas": components}
        for operations in document["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)  # FastAPI's own; nothing here answers with it
        return document

    app.openapi = openapi  # type: ignore[method-assign]
