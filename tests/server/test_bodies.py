"""What can be wrong with a body before it is a request."""

import gzip
import json
import socket
import tracemalloc
import zlib

import msgspec
import pytest
from offramp.runtime.errors import InputError
from offramp.server.errors import DeadlinePassed, QueueFull, TooLarge
from offramp.server.memory import Hold, Memory
from offramp.server.patience import Patience
from offramp.server.protocols.json_body import Body, decode, decoded_bytes
from offramp.server.protocols.packing import unpack
from offramp.server.protocols.reading import PredictRequest

GOOD = json.dumps({"instances": [[0.5] * 8]}).encode()


def packed(body: bytes) -> bytes:
    """Without the time of day: it would be part of the tests' names, which every worker must find alike."""
    return gzip.compress(body, mtime=0)


@pytest.fixture
def small(rows, serve):
    """A server that takes 1,000 bytes."""
    with serve(rows, max_body_bytes=1000) as server, server.client() as client:
        yield client


def post(client, content, **headers):
    return client.post("/v1/predict", content=content, headers={k.replace("_", "-"): v for k, v in headers.items()})


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "it is empty, expected a JSON object"),
        (b" \n", "it is empty"),
        (b"{", "truncated"),
        (b"hello", "malformed"),
        (b"\xff\xfe", "malformed"),
        (b'{"instances": [[NaN, 1]]}', "JSON has no NaN"),
        (b'{"instances": [[Infinity, 1]]}', "JSON has no Infinity"),
        (b'{"instances": [[-Infinity, 1]]}', "JSON has no Infinity"),
        (b'{"instances": [[1e999, 1]]}', "$.instances"),
        (b'{"instances": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b'{"instances": ' + b"[" * 900 + b"]" * 900 + b"}", "instances"),
        (b'{"instances": [["\\ud800"]]}', "half a surrogate pair"),
        (b'{"instances": [["a\\uDBFF b"]]}', "surrogate"),
        (GOOD + GOOD, "malformed"),
    ],
)
def test_what_is_not_json_is_400_and_says_where(client, body, said):
    reply = post(client, body)
    assert reply.status_code == 400, reply.text
    assert said in reply.json()["error"]


@pytest.mark.parametrize("content_type", ["application/json", "text/plain", "application/x-www-form-urlencoded", ""])
def test_the_content_type_does_not_matter(client, content_type):
    assert post(client, GOOD, Content_Type=content_type).status_code == 200


@pytest.mark.parametrize(
    ("packed", "encoding"),
    [
        (packed(GOOD), "gzip"),
        (packed(GOOD[:9]) + packed(GOOD[9:]), "GZIP"),
        (zlib.compress(GOOD), "deflate"),
        (zlib.compress(GOOD)[2:-4], "deflate"),
        (GOOD, "identity"),
    ],
)
def test_packed_bodies_are_unpacked(client, packed, encoding):
    reply = post(client, packed, Content_Encoding=encoding)
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize(
    ("packed", "encoding"),
    [(GOOD, "gzip"), (packed(GOOD)[:-3], "gzip"), (GOOD, "deflate"), (GOOD, "br"), (GOOD, "gzip, gzip")],
)
def test_a_broken_or_unknown_encoding_is_400(client, packed, encoding):
    reply = post(client, packed, Content_Encoding=encoding)
    assert reply.status_code == 400
    assert "encoding" in reply.json()["error"].lower()


def test_a_body_over_the_limit_is_413(small):
    assert post(small, GOOD + b" " * 900).status_code == 200
    reply = post(small, GOOD + b" " * 1000)
    assert reply.status_code == 413
    assert "1000 bytes" in reply.json()["error"]


def test_a_body_of_unknown_length_is_cut_at_the_limit(small):
    assert post(small, (b" " * 100 for _ in range(20))).status_code == 413


def test_a_small_body_that_unpacks_past_the_limit_is_413(small):
    bomb = gzip.compress(GOOD + b" " * 500_000)
    assert len(bomb) < 1000
    assert post(small, bomb, Content_Encoding="gzip").status_code == 413
    assert post(small, gzip.compress(GOOD + b" " * 900), Content_Encoding="gzip").status_code == 200


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_body_of_a_million_empty_members_is_refused_after_a_few(encoding):
    empty = gzip.compress(b"") if encoding == "gzip" else zlib.compress(b"")
    with pytest.raises(TooLarge, match="more than 4096 compressed members"):
        unpack(empty * 1_000_000, encoding, 2**20)


def test_as_many_members_as_block_gzip_makes_are_unpacked_whatever_they_are_cut_at():
    data = bytes(range(256)) * 4000
    for size in (1000, 65_280, len(data)):
        packed = b"".join(gzip.compress(data[at : at + size]) for at in range(0, len(data), size))
        assert unpack(packed, "gzip", len(data)) == data
        with pytest.raises(TooLarge, match="larger than"):
            unpack(packed, "gzip", len(data) - 1)
        with pytest.raises(InputError, match="isn't valid gzip"):
            unpack(packed[:-1], "gzip", len(data))


def test_what_would_take_far_more_memory_than_its_bytes_is_413_and_makes_nothing(client, monkeypatch):
    monkeypatch.setattr("msgspec.json.decode", None)  # whoever decodes fails
    for inside in (b"{},", b"[],", b"0,", b'{"a":{}},'):
        packed = gzip.compress(b'{"instances":[' + inside * (12_000_000 // len(inside)) + b"0]}")
        assert len(packed) < 100_000
        reply = post(client, packed, Content_Encoding="gzip")
        assert reply.status_code == 413, inside
        assert "once decoded" in json.loads(reply.content)["error"]


@pytest.mark.parametrize("ascii_only", [True, False])
@pytest.mark.parametrize(
    "value",
    [
        *([], {}, 0.5, {"a": 1.5}, [[1.5]], {"x": [0.5] * 8}, [[]] * 5, True, None, 10**25, 10**4000),
        *("", "a", "ab", "é", "ж", "😀", "\x00", "a" * 1000, "ж" * 1000, "😀" + "a" * 1000, "ж" + "a" * 1000),
        *({"text": "ab"}, {"b64": "A" * 500}, {f"key {k}": k for k in range(50)}, [f"text {k}" for k in range(50)]),
        {f"ключ {k}": {} for k in range(50)},
    ],
    ids=lambda value: str(value)[:12],
)
def test_what_is_reckoned_for_a_body_is_no_less_than_it_takes(value, ascii_only):
    body = json.dumps([value] * 1000, ensure_ascii=ascii_only).encode()
    tracemalloc.start()
    made = msgspec.json.decode(body)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(made) == 1000
    assert decoded_bytes(body) >= 0.9 * taken


@pytest.mark.parametrize("path", ["/v1/predict", "/v2/models/rows/infer"])
@pytest.mark.parametrize(
    "inside",
    [b"{},", b"[],", b'{"a":{}},', b"0,", b"null,", b'"",', b'"ab",', b'"\\ud83d\\ude00",', b'{"a":"b"},', b"[[]],"],
)
def test_a_body_of_8_kb_that_is_refused_never_took_more_than_a_few_times_its_limit(rows, serve, path, inside):
    limit = 8 * 2**20
    field = b"instances" if path == "/v1/predict" else b"inputs"
    body = gzip.compress(b'{"%s":[' % field + inside * ((limit - 100) // len(inside)) + b"0]}", mtime=0)
    assert len(body) < 70_000
    with serve(rows, max_body_bytes=limit, max_decoded_bytes=limit) as server, server.client() as client:
        client.get("/v2/health/live")
        tracemalloc.start()
        reply = client.post(path, content=body, headers={"Content-Encoding": "gzip"})
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert reply.status_code in (400, 413), reply.text
    assert peak < 4 * limit


def test_one_wide_character_does_not_make_a_long_text_take_what_nobody_reckoned(rows, serve):
    for wide in ("😀", "\\ud83d\\ude00"):
        body = f'{{"instances":["{wide}{"a" * 1_000_000}"]}}'.encode()
        with serve(rows, max_decoded_bytes=3_000_000) as server, server.client() as client:
            reply = post(client, body)
            assert reply.status_code == 413
            assert "once decoded" in reply.json()["error"]
            assert post(client, body.replace(wide.encode(), "é".encode())).status_code == 400  # no texts in this bundle


def connect(server):
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=30)


def test_a_body_announced_far_too_large_is_refused_before_it_is_sent(rows, serve):
    with serve(rows, max_body_bytes=1000) as server, connect(server) as raw:
        raw.sendall(b"POST /v1/predict HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000000\r\n\r\n")
        assert raw.recv(4096).startswith(b"HTTP/1.1 413")


def test_a_body_that_never_arrives_is_503_when_the_time_is_up(rows, serve):
    with serve(rows, timeout=0.3) as server, connect(server) as raw:
        raw.sendall(b"POST /v1/predict HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        answer = b""
        while not answer.endswith(b"}"):  # head and body may come apart
            received = raw.recv(4096)
            assert received, answer
            answer += received
        assert answer.startswith(b"HTTP/1.1 503")
        assert b"didn't arrive within 0.3 seconds" in answer


@pytest.mark.parametrize(
    ("packed", "encoding"),
    [
        (gzip.compress(b" " * 50_000_000), "gzip"),
        (gzip.compress(b"") * 4000, "gzip"),
        (zlib.compress(b" " * 50_000_000), "deflate"),
        (zlib.compress(b" " * 50_000_000)[2:-4], "deflate"),
    ],
)
def test_unpacking_ends_when_its_time_is_over_or_memory_is_full(packed, encoding):
    with pytest.raises(DeadlinePassed):
        unpack(packed, encoding, 2**26, patience=Patience(0))
    with Hold(Memory(90_000)) as held, pytest.raises((QueueFull, TooLarge)):
        unpack(packed + packed, encoding, 2**26, held)


@pytest.mark.parametrize("inside", [b"[],", b"0,", b"[[0.5]],"])
def test_decoding_does_not_begin_when_its_time_is_over(inside, monkeypatch):
    monkeypatch.setattr("msgspec.json.decode", None)  # whoever decodes fails
    data = bytearray(b'{"instances":[' + 1000 * inside + b"0]}")
    with Hold(Memory(2**30)) as held, pytest.raises(DeadlinePassed):
        decode(Body([data], "", held, Patience(0)), PredictRequest, 2**27)


def test_a_timeout_covers_unpacking_and_decoding_too(rows, serve):
    many = gzip.compress(b'{"instances":[' + b"[0.1,0.1,0.1,0.1,0.1,0.1,0.1,0.1]," * 16_000 + b"0]}")
    with serve(rows, timeout=0.001) as server, server.client() as client:
        for body, encoding in ((many, "gzip"), (gzip.decompress(many), "identity")):
            reply = post(client, body, Content_Encoding=encoding)
            assert reply.status_code == 503
            assert "within 0.001 s" in reply.json()["error"]
        assert server.metric("rows_total", operating_point="full") == 0


def test_memory_counts_what_all_requests_hold_and_gives_it_back():
    memory = Memory(1_000_000)
    free = 65_536
    with Hold(memory) as one, Hold(memory) as other:
        one.set(600_000)
        assert memory.held == 600_000 - free
        other.set(free)  # a small one gets through whatever the others hold
        with pytest.raises(QueueFull, match="Try again later"):
            other.set(700_000)
        one.set(100_000)
        other.set(700_000)
        with pytest.raises(TooLarge, match="fewer rows"):
            other.set(1_000_001)
    assert memory.held == 0
    one.set(500_000)  # a thread that is still at it
    assert memory.held == 0


def test_an_answer_that_takes_too_much_memory_is_413_before_anything_runs(rows, serve, x):
    with serve(rows, max_decoded_bytes=20_000) as server, server.client() as client:
        body = {"instances": x.tolist(), "probabilities": True}
        assert client.post("/v1/predict", json=body).status_code == 200
        many = {"instances": [[0] * 8] * 40 * 3, "probabilities": True}
        reply = client.post("/v1/predict", json=many)
        assert reply.status_code == 413
