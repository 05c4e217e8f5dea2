"""The server that is asked: where it is, which model and points it has, what its rows look like."""

import http.client
import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlsplit

from offramp.runtime.bundle import Input, Manifest
from offramp.runtime.errors import InputError
from offramp.runtime.preprocess import Image, Text
from offramp.server.protocols.reading import DTYPES

_PATIENCE = 30.0


@dataclass(frozen=True)
class Target:
    """A server. points: its operating points in its order. default: the one of requests that name none.

    manifest: as much of the bundle's as the server tells, enough to read data for it.
    """

    host: str
    port: int
    points: list[str]
    default: str
    manifest: Manifest

    @property
    def url(self) -> str:
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    def answer(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        """One request on a connection of its own. Raises OSError or http.client.HTTPException if it isn't answered."""
        return _ask(self.host, self.port, method, path, body)


def is_url(target: str) -> bool:
    return "://" in target


def target(url: str) -> Target:
    """Ask a running offramp server what it is. Raises InputError naming what isn't as expected."""
    host, port = _address(url)
    listed = _json(url, host, port, "/v1/operating-points")
    name = listed.get("model")
    described = _json(url, host, port, f"/v2/models/{quote(str(name), safe='')}")
    try:
        raw = listed["raw_rows"]
        manifest = _manifest(str(name), str(listed["version"]), listed["classes"], described["inputs"], raw)
        return Target(host, port, list(listed["operating_points"]), str(listed["operating_point"]), manifest)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise InputError(f"{url}: can't be understood ({error!r}): is it offramp's, of this version?") from error


def _address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    try:
        port = parts.port or 80
    except ValueError as error:
        raise InputError(f"{url}: {error}.") from error
    if parts.scheme != "http" or not parts.hostname or parts.path not in ("", "/") or parts.query:
        raise InputError(f"{url}: expected a server's address without TLS and without a path, http://host:port.")
    return parts.hostname, port


def _ask(host: str, port: int, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(host, port, timeout=_PATIENCE)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json"} if body else {})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def _json(url: str, host: str, port: int, path: str) -> Any:
    try:
        status, data = _ask(host, port, "GET", path)
        if status == 200:
            found = json.loads(data)
            if isinstance(found, dict):
                return found
    except OSError as error:
        raise InputError(f"{url}: can't be reached ({error.strerror or error}).") from error
    except (http.client.HTTPException, ValueError) as error:
        raise InputError(f"{url}: answers {path} with something that isn't HTTP and JSON: is it offramp's?") from error
    raise InputError(f"{url}: answers {path} with the status {status}: is it offramp's?")


def _manifest(name: str, version: str, classes: list[str], inputs: list[Any], raw: str | None) -> Manifest:
    given = []
    for one in inputs:
        sizes = [size if size >= 0 else None for size in one["shape"]]
        batch = sizes.index(None)  # the protocol has no names of axes; the batch is the first that isn't fixed
        axes = [f"axis_{k}" if size is None and k != batch else size or "batch" for k, size in enumerate(sizes)]
        given.append(Input(name=one["name"], dtype=DTYPES[one["datatype"]], shape=axes))
    # What the readers of data look at is the kind, and nothing is prepared here.
    first = given[0].name
    preprocess = {
        None: None,
        "text": Text(tokenizer="", ids=first, max_length=1),
        "image": Image(input=first, height=1, width=1, mean=[0.0], std=[1.0]),
    }[raw]
    return Manifest(
        schema="", name=name, version=version, created="", producer="", classes=classes, inputs=given, tensors={},
        blocks=[], segments=[], exits=[], files={}, digest="", preprocess=preprocess,
    )  # fmt: skip
