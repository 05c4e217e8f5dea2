"""From a signal to the exit: what is here is answered, and it ends in time whatever clients do."""

import re
import signal
import time

import httpx
import pytest

LIVE = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n"
ROW = [0.5] * 8


@pytest.fixture
def started(offramp_serve):
    """A server in a process of its own, and its address."""

    def start(bundle, *arguments):
        process = offramp_serve(bundle, "--port", 0, "--threads", 1, *arguments)
        said = process.stdout.readline()
        return process, re.search(r"http://\S+:\d+", said)[0]

    return start


@pytest.fixture
def occupied(started, slow_bundle, raw, post, eventually):
    """A server with a request in work that takes many seconds, and its client."""

    def start(*arguments):
        process, address = started(slow_bundle, *arguments)
        client = raw(address).send(post([ROW] * 16_000))
        running = re.compile(r"^offramp_queue_duration_seconds_count.* 1\.0$", re.MULTILINE)
        eventually(lambda: running.search(httpx.get(f"{address}/metrics", timeout=60).text))
        return process, address, client

    return start


@pytest.mark.parametrize("kept", [0, 16, 32])
def test_whole_requests_that_lie_in_the_sockets_are_answered_not_reset(started, rows_bundle, raw, post, kept):
    process, address = started(rows_bundle)
    clients = [raw(address) for _ in range(32)]
    for client in clients[:kept]:
        assert client.send(LIVE).alive()
    process.send_signal(signal.SIGSTOP)
    for k, client in enumerate(clients):
        client.send(post([ROW]) * (1 + k % 3))
    late = [raw(address).send(post([ROW])) for _ in range(8)]  # not even accepted yet
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGCONT)
    for k, client in enumerate([*clients, *late]):
        answer = client.rest()
        assert len(re.findall(rb"HTTP/1.1 (?:200|503)", answer)) == (1 + k % 3 if k < 32 else 1)
        assert b"connection: close" in answer.lower()
        assert (b"retry-after: 1" in answer.lower()) == (b"HTTP/1.1 503" in answer)
    assert process.wait(timeout=60) == 0
    assert process.stderr.read() == ""


def test_every_answer_during_the_drain_closes_its_connection(occupied, raw, post):
    process, address, client = occupied("--drain-timeout", 4)
    kept = raw(address).send(LIVE)
    assert kept.alive()
    half = raw(address).send(post([ROW])[:-5])
    process.send_signal(signal.SIGTERM)
    answer = half.rest()
    assert answer.startswith(b"HTTP/1.1 503")
    assert b"connection: close" in answer.lower()
    for sent, status in ((post([ROW]), 503), (LIVE, 200), (b"GET /v2/health/ready HTTP/1.1\r\nHost: x\r\n\r\n", 503)):
        answer = kept.send(sent).rest()
        kept = raw(address)
        assert answer.startswith(b"HTTP/1.1 %d" % status)
        assert b"connection: close" in answer.lower()
    client.close()
    assert process.wait(timeout=60) == 0


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_what_is_not_answered_at_the_drains_limit_gets_503_and_the_exit_code_is_0(occupied, raw, post, sig):
    process, address, client = occupied("--drain-timeout", 1)
    waiting = raw(address).send(post([ROW] * 8000))
    stuck = [raw(address).send(sent) for sent in (b"", b"GET /", post([ROW])[:-5], LIVE + b"GE")]
    time.sleep(0.2)
    process.send_signal(sig)
    started = time.monotonic()
    for one in (client, waiting):
        answer = one.rest()
        assert answer.startswith(b"HTTP/1.1 503")
        assert b"connection: close" in answer.lower()
    for one in stuck:
        one.rest()
    assert process.wait(timeout=60) == 0
    assert time.monotonic() - started < 10
    assert process.stderr.read() == ""


def test_clients_that_do_not_read_do_not_hold_the_exit_up(started, rows_bundle, raw, post, eventually):
    process, address = started(rows_bundle, "--drain-timeout", 2)
    for _ in range(4):
        raw(address, small_buffer=True).send(post([ROW] * 16_000))
    answered = re.compile(r'^offramp_rows_total\{.*"full".* 64000\.0$', re.MULTILINE)
    eventually(lambda: answered.search(httpx.get(f"{address}/metrics", timeout=60).text))
    process.send_signal(signal.SIGTERM)
    started_at = time.monotonic()
    assert process.wait(timeout=60) == 0
    assert time.monotonic() - started_at < 10
    assert process.stderr.read() == ""


@pytest.mark.parametrize("begun", [4, 24], ids=["with most still in work", "with all answered"])
@pytest.mark.parametrize("memory", [2**24, 2**29], ids=["too many for its memory", "all in its memory"])
def test_a_crowd_that_does_not_read_does_not_hold_the_exit_up(
    started, rows_bundle, raw, post, eventually, begun, memory
):
    process, address = started(rows_bundle, "--drain-timeout", 3, "--max-bytes-in-flight", memory)
    for _ in range(24):
        raw(address, small_buffer=True).send(post([ROW] * 8000))
    ended = re.compile(r"^offramp_requests_total\{.* (\d+)\.0$", re.MULTILINE)
    eventually(lambda: sum(map(int, ended.findall(httpx.get(f"{address}/metrics", timeout=60).text))) >= begun)
    process.send_signal(signal.SIGTERM)
    started_at = time.monotonic()
    assert process.wait(timeout=60) == 0
    assert time.monotonic() - started_at < 15
    assert process.stderr.read() == ""


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_second_signal_ends_it_at_once_with_that_signals_exit_code(occupied, eventually, second):
    process, address, _ = occupied()
    process.send_signal(signal.SIGTERM)
    eventually(lambda: httpx.get(f"{address}/v2/health/ready").status_code == 503)
    process.send_signal(second)
    assert process.wait(timeout=20) == 128 + second
    assert process.stderr.read() == ""
