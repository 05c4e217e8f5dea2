"""Large bodies are decoded in processes of their own: with the same answers, and none of them outlives anything."""

import asyncio
import gzip
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest
from offramp.runtime.errors import OfframpError
from offramp.server import dataplane
from offramp.server.decoding.decoders import Decoders
from offramp.server.errors import DeadlinePassed, TooLarge
from offramp.server.memory import Hold, Memory
from offramp.server.patience import Attended, Patience
from offramp.server.protocols.json_body import Body
from offramp.server.protocols.reading import READERS, Limits
from starlette.requests import Request

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes are found in /proc")
LIMITS = Limits(2**25, 2**27, 16_384)
GOOD = [[0.5] * 8] * 3
TENSOR = {"name": "x", "shape": [3, 8], "datatype": "FP32", "data": GOOD}
BODIES = {
    "predict": [
        {"instances": GOOD},
        {"instances": []},
        {"instances": GOOD, "operating_point": "ж", "max_exit": 10**25, "timeout": 2.5, "probabilities": True},
        {"instances": [[0.5] * 8, [0.5] * 7]},
        {"instances": [[0.5] * 8, {"x": [1] * 8}, {"x": [True] * 8}]},
        {"instances": [{"y": [0.5] * 8}]},
        {"instances": [[None] * 8]},
        {"instances": [[[0.5], 1]]},
        {"instances": [[1e39] * 8]},
        {"instances": [[10**25] * 8]},
        {"instances": ["a text", "ж 😀 \\"]},
        {"instances": [{"text": "a"}, {"b64": "b"}]},
        {"instances": ["a text", 5]},
        {"instances": [[0] * 8] * 16_385},
        {"instances": GOOD, "timeout": -1},
        {"instances": GOOD, "max_exit": "0"},
        {"instances": GOOD, "other": 1},
        {},
        [],
        {"instances": [[[0.5] * 3, [0.5] * 2]]},
    ],
    "infer": [
        {"inputs": [TENSOR]},
        {"inputs": [TENSOR], "id": "ж", "outputs": [{"name": "probabilities"}, {"name": "class"}]},
        {"inputs": [TENSOR], "parameters": {"priority": 3, "timeout": 10, "max_exit": 10**30, "x": {"y": [10**30]}}},
        {"inputs": [TENSOR, TENSOR]},
        {"inputs": [{**TENSOR, "shape": [8, 3]}]},
        {"inputs": [{**TENSOR, "shape": [0, 8], "data": []}]},
        {"inputs": [{**TENSOR, "datatype": "INT64"}]},
        {"inputs": [{**TENSOR, "datatype": "BYTES"}]},
        {"inputs": [{**TENSOR, "name": "z"}]},
        {"inputs": [TENSOR], "outputs": [{"name": "z"}]},
        {"inputs": [TENSOR], "parameters": {"priority": 10}},
        {"inputs": []},
        {"id": 5},
    ],
    "binary": [{"inputs": [TENSOR]}],
}
BROKEN = [b"", b"{", b"hello", b"\xff\xfe", b'{"instances": [[NaN, 1]]}', b'{"inputs": ["\\ud800"]}', b"[" * 100_000]
ALL = [(kind, json.dumps(body).encode()) for kind, bodies in BODIES.items() for body in bodies]
ALL += [(kind, body) for kind in ("predict", "infer") for body in BROKEN]


@pytest.fixture(scope="module")
def manifest(rows):
    return rows.manifest


@pytest.fixture(scope="module")
def decoders(manifest):
    made = Decoders(manifest, LIMITS)
    yield made
    made.close()


@pytest.fixture
def apart(monkeypatch):
    """Bodies of any size are decoded apart."""
    monkeypatch.setattr(dataplane, "DECODED_APART", 0)


def body_of(data, seconds=60.0, memory=2**30, encoding="identity"):
    return Body([bytearray(data)], encoding, Hold(Memory(memory)), Patience(seconds))


def children(of=None):
    """Decoders of a process, by default this one."""
    found = set()
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            about, command = status.read_text(), (status.parent / "cmdline").read_text()
        except OSError:
            continue
        if (
            f"PPid:\t{of or os.getpid()}\n" in about
            and "offramp.server.decoding" in command
            and "State:\tZ" not in about
        ):
            found.add(int(status.parent.name))
    return found


def outcome(read):
    """What a body asks for in a form that can be compared, or its error."""
    try:
        asked = read()
    except OfframpError as error:
        return type(error), str(error)
    groups = [
        ({name: (a.dtype, a.shape, a.tobytes()) for name, a in g.arrays.items()}, g.sizes, g.positions.tolist())
        for g in asked.groups
    ]
    return asked.fields, asked.rows, asked.raw, groups


@pytest.mark.parametrize(("kind", "data"), ALL, ids=[f"{kind}-{k}" for k, (kind, _) in enumerate(ALL)])
def test_a_body_decoded_apart_is_the_same_or_wrong_in_the_same_words(decoders, manifest, kind, data):
    here = outcome(lambda: READERS[kind](body_of(data), manifest, LIMITS))
    there = outcome(lambda: asyncio.run(decoders.read(kind, body_of(data))))
    assert there == here


PACKED = {
    "good": gzip.compress(ALL[0][1]),
    "cut": gzip.compress(ALL[0][1])[:-3],
    "a bomb": gzip.compress(b" " * 2**26),
    "empty": b"",
}


@pytest.mark.parametrize("packed", PACKED.values(), ids=PACKED)
def test_a_packed_body_is_the_same_too(decoders, manifest, packed):
    here = outcome(lambda: READERS["predict"](body_of(packed, encoding="gzip"), manifest, LIMITS))
    there = outcome(lambda: asyncio.run(decoders.read("predict", body_of(packed, encoding="gzip"))))
    assert there == here


def test_several_lengths_are_several_groups(tokens):
    decoders = Decoders(tokens.manifest, LIMITS)
    data = json.dumps({"instances": [{"ids": [1] * n, "mask": [1] * n} for n in (3, 5, 3)]}).encode()
    here = outcome(lambda: READERS["predict"](body_of(data), tokens.manifest, LIMITS))
    assert outcome(lambda: asyncio.run(decoders.read("predict", body_of(data)))) == here
    decoders.close()


def test_what_it_takes_is_counted_before_it_is_made(decoders, manifest):
    data = b'{"instances":[' + b"[0.5,0.5,0.5,0.5,0.5,0.5,0.5,0.5]," * 9_999 + b"[1]]}"
    kind, message = outcome(lambda: asyncio.run(decoders.read("predict", body_of(data, memory=len(data) * 2))))
    assert kind is TooLarge
    assert "fewer rows" in message
    small = Decoders(manifest, Limits(2**25, 1000, 10))
    assert "once decoded" in outcome(lambda: asyncio.run(small.read("predict", body_of(data))))[1]
    small.close()


@pytest.fixture
def stopped(rows, serve, apart):
    """A server, and its decoder, which does nothing at all until it is killed."""
    before = children()
    with serve(rows) as server, server.client() as client:
        assert client.post("/v1/predict", json={"instances": GOOD}).status_code == 200
        (decoder,) = children() - before
        os.kill(decoder, signal.SIGSTOP)
        yield server, decoder
    assert children() == before


def posted(server, body, replies):
    """In a thread of its own, which appends the reply."""

    def post():
        with server.client() as client:
            replies.append(client.post("/v1/predict", json=body))

    thread = threading.Thread(target=post)
    thread.start()
    return thread


def test_a_decoder_that_is_killed_is_503_in_one_sentence_and_the_next_request_gets_another(stopped, eventually):
    server, decoder = stopped
    replies = []
    thread = posted(server, {"instances": GOOD}, replies)
    eventually(lambda: server.app.state.decoders.busy == 1)
    os.kill(decoder, signal.SIGKILL)
    thread.join()
    assert replies[0].status_code == 503
    assert "decodes large bodies has ended" in replies[0].json()["error"]
    assert replies[0].headers["retry-after"] == "1"
    with server.client() as client:
        assert client.post("/v1/predict", json={"instances": GOOD}).status_code == 200


def test_a_decoder_that_died_while_nobody_needed_it_is_nobodys_trouble(stopped, eventually):
    server, decoder = stopped
    os.kill(decoder, signal.SIGKILL)
    eventually(lambda: decoder not in children())
    with server.client() as client:
        assert client.post("/v1/predict", json={"instances": GOOD}).status_code == 200


def test_a_deadline_ends_decoding(stopped, rows, serve, eventually):
    before = children()
    with serve(rows, timeout=30) as server, server.client() as client:
        assert client.post("/v1/predict", json={"instances": GOOD}).status_code == 200
        (decoder,) = children() - before
        os.kill(decoder, signal.SIGSTOP)
        body = body_of(json.dumps({"instances": GOOD}).encode(), seconds=0.2)

        async def read():
            with Attended(Request({"type": "http", "headers": []}), body.patience):
                await server.app.state.decoders.read("predict", body)

        with pytest.raises(DeadlinePassed):
            asyncio.run(read())
        eventually(lambda: decoder not in children())
        assert client.post("/v1/predict", json={"instances": GOOD}).status_code == 200


def test_a_client_that_leaves_ends_decoding(stopped, eventually):
    server, decoder = stopped
    body = json.dumps({"instances": GOOD}).encode()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as client:
        client.sendall(b"POST /v1/predict HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        eventually(lambda: server.app.state.decoders.busy == 1)
    eventually(lambda: decoder not in children())
    eventually(lambda: server.metric("requests_total", outcome="cancelled") == 1)
    assert server.app.state.memory.held == 0


def test_others_are_answered_while_a_body_is_decoded(stopped, monkeypatch, eventually):
    server, decoder = stopped
    replies = []
    thread = posted(server, {"instances": GOOD}, replies)
    eventually(lambda: server.app.state.decoders.busy == 1)
    with server.client() as client:
        assert client.post("/v1/predict", json={"instances": GOOD}).status_code == 200  # another decoder's
        monkeypatch.setattr(dataplane, "DECODED_APART", 2**20)
        for _ in range(3):
            assert client.post("/v1/predict", json={"instances": GOOD}).status_code == 200
    assert not replies
    os.kill(decoder, signal.SIGCONT)
    thread.join()
    assert replies[0].status_code == 200


def test_decoders_end_with_their_server_even_if_it_is_killed(rows_bundle, offramp_serve, eventually):
    server = offramp_serve(rows_bundle, "--port", 0)
    url = re.search(r"http://\S+", server.stdout.readline())[0]
    body = {"instances": [[0.5] * 8] * 16_000}
    assert httpx.post(f"{url}/v1/predict", json=body, timeout=60).status_code == 200
    decoders = children(server.pid)
    assert len(decoders) == 1
    server.kill()
    server.wait()
    eventually(lambda: not any(Path(f"/proc/{decoder}").exists() for decoder in decoders))


def test_a_decoder_loads_neither_the_model_nor_the_server():
    code = (
        "import sys, offramp.server.decoding.__main__; "
        "print(*{'onnxruntime', 'fastapi', 'starlette', 'uvicorn', 'scipy'} & set(sys.modules))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (said.stdout, said.stderr) == ("\n", "")
