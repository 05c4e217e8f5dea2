"""Clients that are too slow, too many or too large: each is told, none costs the others anything."""

import json
import re
import time

import numpy as np
import pytest

LIVE = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n"
HEAD = b"POST /v1/predict HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n"
CHUNKED = b"POST /v1/predict HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
ROW = [0.5] * 8


def errors(answer):
    """The statuses of the answers, the last one's error."""
    statuses = [int(status) for status in re.findall(rb"HTTP/1.1 (\d+)", answer)]
    return statuses, json.loads(answer.rpartition(b"\r\n\r\n")[2])["error"]


@pytest.mark.parametrize("sent", [b"G", b"GET / HT", b"GET / HTTP/1.1\r\n", LIVE[:-2], HEAD[:-1]])
def test_a_head_that_does_not_arrive_is_408(rows, serve, raw, sent):
    with serve(rows, header_timeout=0.3) as server:
        statuses, error = errors(raw(server.url).send(sent).rest())
        assert statuses == [408]
        assert "head didn't arrive within 0.3 seconds" in error


def test_a_head_that_drips_is_408_and_a_connection_without_a_byte_is_closed_without_a_word(rows, serve, raw):
    with serve(rows, header_timeout=0.5) as server:
        silent, client, started = raw(server.url), raw(server.url), time.monotonic()
        while time.monotonic() < started + 30:
            try:
                client.send(b"x")
            except OSError:
                break
            time.sleep(0.05)
        assert time.monotonic() < started + 30
        assert silent.rest() == b""


def test_the_second_head_of_a_kept_connection_is_timed_too_but_its_idle_time_is_not(rows, serve, raw):
    with serve(rows, header_timeout=0.3) as server:
        client = raw(server.url).send(LIVE)
        assert client.alive()
        time.sleep(1)
        client.send(LIVE)
        assert client.alive()
        assert errors(client.send(b"GET /").rest())[0] == [408]


def test_a_kept_connection_is_closed_when_it_idles_too_long(rows, serve, raw):
    with serve(rows, keep_alive=0.2) as server:
        assert raw(server.url).send(LIVE).rest().startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("sent", [HEAD, HEAD + b"{", CHUNKED, CHUNKED + b"5\r\n[", CHUNKED + b"1\r\n[\r\n"])
def test_a_body_that_stops_coming_is_408(rows, serve, raw, sent):
    with serve(rows, body_timeout=0.3) as server:
        answer = raw(server.url).send(sent).rest()
        statuses, error = errors(answer)
        assert statuses == [408]
        assert "nothing of the request body came for 0.3 seconds" in error
        assert b"connection: close" in answer.lower()
        assert b"x-request-id" in answer.lower()


def test_a_body_that_nobody_reads_does_not_keep_the_connection(rows, serve, raw):
    with serve(rows) as server:
        for path in (b"/nowhere", b"/v2/health/live", b"/metrics"):
            client = raw(server.url).send(b"POST " + path + b" HTTP/1.1\r\nHost: x\r\nContent-Length: 9999999\r\n\r\n{")
            answer = client.rest()
            assert answer.startswith(b"HTTP/1.1 40")
            assert b"connection: close" in answer.lower()


def test_a_client_that_still_sends_reads_why_it_was_refused(rows, serve, raw):
    with serve(rows, max_body_bytes=1000) as server:
        for _ in range(5):
            client = raw(server.url).send(b"POST /v1/predict HTTP/1.1\r\nHost: x\r\nContent-Length: 3000000\r\n\r\n")
            client.send(b"0" * 3_000_000)
            assert errors(client.rest())[0] == [413]


def test_a_client_that_does_not_read_is_cut_off_and_others_are_answered(rows, serve, raw, post, eventually):
    many = post([ROW] * 16_000)
    with serve(rows, write_timeout=1, timeout=60) as server:
        clients = [raw(server.url, small_buffer=True).send(many) for _ in range(3)]
        eventually(lambda: server.metric("rows_total", operating_point="balanced") == 48_000)
        assert raw(server.url).send(LIVE).socket.recv(100).startswith(b"HTTP/1.1 200")
        time.sleep(2.5)
        for client in clients:
            with pytest.raises(ConnectionResetError):
                client.rest()


def test_a_client_that_reads_slowly_gets_all_of_it(rows, serve, raw, post):
    with serve(rows, write_timeout=1) as server:
        client = raw(server.url, small_buffer=True).send(post([ROW] * 4000, headers="Connection: close\r\n"))
        got = b""
        while received := client.socket.recv(16_384):
            got += received
            time.sleep(0.01)
        assert got.count(b'"label":') == 4000


def test_one_connection_more_takes_the_place_of_whoever_idles_longest(rows, serve, raw, post):
    with serve(rows, max_connections=8) as server:
        first = raw(server.url).send(LIVE)
        assert first.alive()
        half = [raw(server.url).send(sent) for sent in (HEAD, b"GET /", HEAD[:30], LIVE[:-2], HEAD + b"[")]
        time.sleep(0.2)  # so that their halves have been read
        idle = [raw(server.url) for _ in range(20)]
        assert raw(server.url).send(LIVE).socket.recv(100).startswith(b"HTTP/1.1 200")
        assert first.rest() == b"", "whoever asked nothing is told nothing"
        for client in half:
            statuses, error = errors(client.rest())
            assert statuses == [503]
            assert "too many connections" in error
        assert idle[0].rest() == b""
        assert raw(server.url).send(post([ROW])).socket.recv(100).startswith(b"HTTP/1.1 200")


def test_where_every_connection_has_work_one_more_is_503_with_a_time_to_come_again(slow, serve, raw, post, eventually):
    rows = np.random.default_rng(0).normal(size=(4000, 8)).round(2).tolist()
    with serve(slow, max_connections=2) as server:
        busy = [raw(server.url).send(post(rows)) for _ in range(2)]
        eventually(lambda: server.metric("queue_duration_seconds_count", block="0") == 2)
        answer = raw(server.url).rest()
        assert errors(answer)[0] == [503]
        assert b"retry-after: 1" in answer.lower()
        for client in busy:
            client.close()
        eventually(lambda: server.metric("requests_total", outcome="cancelled") == 2)
        assert raw(server.url).send(LIVE).socket.recv(100).startswith(b"HTTP/1.1 200")


def test_a_client_that_asks_twice_in_a_row_and_leaves_stops_its_rows(slow, serve, raw, post, eventually):
    rows = np.random.default_rng(0).normal(size=(8000, 8)).round(2).tolist()
    with serve(slow) as server:
        for behind in (LIVE, post([ROW]), LIVE[:10], b""):
            before = server.metric("requests_total", outcome="cancelled")
            client = raw(server.url).send(post(rows) + behind)
            started = server.metric("queue_duration_seconds_count", block="0")
            eventually(lambda started=started: server.metric("queue_duration_seconds_count", block="0") > started)
            client.close()
            eventually(lambda before=before: server.metric("requests_total", outcome="cancelled") == before + 1)


def test_unfinished_uploads_are_counted_and_small_requests_get_through(rows, serve, raw, post, eventually):
    with serve(rows, max_bytes_in_flight=500_000) as server:
        part = b"POST /v1/predict HTTP/1.1\r\nHost: x\r\nContent-Length: 900000\r\n\r\n" + b" " * 300_000
        first = raw(server.url).send(part)
        eventually(lambda: server.app.state.memory.held > 200_000)
        answer = raw(server.url).send(part + b" " * 200_000).rest()
        assert errors(answer)[0] == [429]
        assert b"retry-after: 1" in answer.lower()
        assert b"connection: close" in answer.lower()
        assert raw(server.url).send(post([ROW])).socket.recv(100).startswith(b"HTTP/1.1 200")
        first.close()
        eventually(lambda: server.app.state.memory.held == 0)
        assert server.metric("requests_total", outcome="rejected") == 1
