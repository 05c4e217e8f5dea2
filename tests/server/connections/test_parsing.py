"""What could be read in two ways is refused, and what lies behind a request waits for its turn."""

import pytest

pytestmark = pytest.mark.parametrize("parser", ["httptools", "h11"], indirect=True)

LIVE = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n"
AMBIGUOUS = {
    "a length and chunks": b"POST /v1/predict HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + LIVE,
    "two lengths": b"POST /v1/predict HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n{}",
    "a length that is none": b"POST /v1/predict HTTP/1.1\r\nHost: x\r\nContent-Length: +1\r\n\r\n{",
    "a space before the colon": b"GET /v2/health/live HTTP/1.1\r\nHost : x\r\n\r\n",
    "chunks that aren't last": b"POST /v1/predict HTTP/1.1\r\nHost: x\r\n"
    b"Transfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n",
    "a chunk without a size": b"POST /v1/predict HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
    "no HTTP": b"\0\0\0\r\n\r\n",
}


@pytest.mark.parametrize("sent", AMBIGUOUS.values(), ids=AMBIGUOUS)
def test_what_could_be_read_in_two_ways_is_400_or_501_and_the_last_of_its_connection(rows, serve, raw, parser, sent):
    if parser == "h11" and sent is AMBIGUOUS["a length and chunks"]:
        pytest.skip("to h11 it is chunks, as RFC 9112 (6.1) lets a server have it")
    with serve(rows) as server:
        answer = raw(server.url).send(sent).rest()
    assert answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 501"))
    assert answer.count(b"HTTP/1.1") == 1
    assert b"connection: close" in answer.lower()


def test_a_head_without_end_is_refused_and_its_limit_named(rows, serve, raw, parser):
    with serve(rows) as server:
        answer = raw(server.url).send(b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 70_000).rest()
    if parser == "h11":  # uvicorn's own words
        assert answer.startswith(b"HTTP/1.1 400")
    else:
        assert answer.startswith(b"HTTP/1.1 431")
        assert b"larger than 65,536 bytes" in answer
    assert b"connection: close" in answer.lower()


def test_requests_behind_each_other_are_answered_in_their_order_and_what_is_wrong_last(rows, serve, raw, post, parser):
    many = b"".join(post([[k] * 8], headers=f"X-Request-ID: {k}\r\n") for k in range(300))
    with serve(rows) as server:
        answer = raw(server.url).send(many + b"\0\0\0\r\n\r\n").rest()
    places = [answer.index(b'"request_id":"%d"' % k) for k in range(300)]
    assert places == sorted(places)
    assert answer.count(b"HTTP/1.1 200") == 300
    assert answer.count(b"HTTP/1.1 400") == 1


def test_an_upgrade_that_nobody_offers_is_not_made_and_the_request_is_answered(rows, serve, raw, parser):
    with serve(rows) as server:
        asked = LIVE.replace(b"\r\n\r\n", b"\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
        client = raw(server.url).send(asked)
        assert client.alive()


@pytest.mark.parametrize("size", [1, 7, 1000, 65_536])
def test_a_request_may_come_in_pieces_of_any_size(rows, serve, raw, post, parser, size):
    sent = post([[0.5] * 8]) * 2
    with serve(rows) as server:
        client = raw(server.url)
        for at in range(0, len(sent), size):
            client.send(sent[at : at + size])
        client.send(LIVE.replace(b"Host", b"Connection: close\r\nHost"))
        assert client.rest().count(b"HTTP/1.1 200") == 3
