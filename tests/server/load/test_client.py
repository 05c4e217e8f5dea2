"""The client: what it sends, what it counts, and that a server which stalls can't hide it."""

import socket
import threading
import time

import numpy as np
import pytest
from offramp.server.load.client import closed_loop, open_loop
from offramp.server.load.connection import HUNG_UP, MALFORMED, REFUSED, TIMED_OUT, UNANSWERED
from offramp.server.load.requests import post

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
BUSY = b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n"
REQUESTS = [post("here", "/v1/predict", b"%d" % k) for k in range(5)]


def closed(server, connections=2, seconds=0.8, **options):
    return closed_loop(
        server.address, REQUESTS, connections, begin=time.monotonic(), warm=0.0, seconds=seconds, **options
    )


def opened(server, rate=100, seconds=0.5, **options):
    arrivals = (np.arange(int(rate * seconds)) / rate).tolist()
    return open_loop(server.address, REQUESTS, arrivals, begin=time.monotonic(), warm=0.0, seconds=seconds, **options)


def test_bodies_are_sent_in_turn_on_connections_that_are_kept(answering):
    with answering(lambda request: OK) as server:
        tally = closed(server, connections=1)
    assert set(tally.outcomes) == {"200"}
    assert tally.carried == tally.outcomes["200"] == len(tally.latencies)
    bodies = [request.partition(b"\r\n\r\n")[2] for request in server.asked]
    assert bodies == [b"%d" % (k % 5) for k in range(len(bodies))]
    assert tally.busy >= 0


@pytest.mark.parametrize(
    "answer",
    [
        [OK[:20], OK[20:-1], OK[-1:]],
        b"HTTP/1.1 200 OK\r\ncontent-length:0\r\n\r\n",
        [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n", b"0\r\n\r\n"],
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok",
    ],
)
def test_answers_come_in_pieces_in_chunks_or_on_connections_that_end(answering, answer):
    with answering(lambda request: answer) as server:
        assert set(closed(server).outcomes) == {"200"}
        assert set(opened(server).outcomes) == {"200"}


def test_an_answer_without_a_length_ends_with_its_connection(answering):
    counted = []

    def say(request):
        counted.append(request)
        return b"HTTP/1.1 200 OK\r\n\r\nall there is"

    with answering(lambda request: None) as silent:
        assert set(closed(silent).outcomes) == {HUNG_UP}
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def once():
            connection = listener.accept()[0]
            connection.recv(65536)
            connection.sendall(say(b""))
            connection.close()

        thread = threading.Thread(target=once)
        thread.start()
        address = socket.AF_INET, listener.getsockname()
        tally = open_loop(address, REQUESTS, [0.0], begin=time.monotonic(), warm=0.0, seconds=0.1)
        thread.join()
    assert tally.outcomes == {"200": 1}


def test_a_body_larger_than_the_sockets_buffers_arrives_whole(answering):
    large = post("here", "/v1/predict", bytes(8_000_000))
    with answering(lambda request: OK) as server:
        tally = open_loop(server.address, [large], [0.0, 0.0], begin=time.monotonic(), warm=0.0, seconds=0.1)
    assert tally.outcomes == {"200": 2}
    assert [len(request) for request in server.asked] == [len(large)] * 2


def test_what_is_refused_is_counted_by_status_and_has_no_latency(answering):
    answers = {b"0": OK, b"1": BUSY, b"2": BUSY.replace(b"429 Too Many Requests", b"503 Unavailable")}
    with answering(lambda request: answers.get(request[-1:], OK)) as server:
        for tally in (closed(server), opened(server)):
            assert set(tally.outcomes) == {"200", "429", "503"}
            assert len(tally.latencies) == tally.outcomes["200"]


def test_a_server_that_hangs_up_or_is_none_is_counted(answering):
    with answering(lambda request: None) as server:
        assert set(closed(server).outcomes) == {HUNG_UP}
        assert opened(server).outcomes == {HUNG_UP: 50}
    assert set(closed(server).outcomes) == {REFUSED}
    assert opened(server).outcomes == {REFUSED: 50}
    with answering(lambda request: b"SSH-2.0-OpenSSH_9.2\r\n") as server:
        assert set(closed(server).outcomes) == {MALFORMED}


def test_a_stall_shows_in_the_open_loop(answering):
    """A second in which nothing is answered: whoever came meanwhile waited, whether or not a connection was free."""
    turn, count = threading.Lock(), []

    def answer(request):
        with turn:
            count.append(request)
            if len(count) == 50:
                time.sleep(1)
        return OK

    for most in (1024, 1):
        count.clear()
        with answering(answer) as server:
            tally = opened(server, rate=100, seconds=2, most=most)
        assert sum(tally.outcomes.values()) == 200
        late = np.array(tally.latencies)
        # One that came at the stall's beginning waited for all of it, one that came later for what was left.
        assert np.quantile(late, 0.99) > 0.8
        assert (late > 0.25).sum() >= 60


def test_what_is_never_answered_counts_with_how_long_it_was_waited_for(answering):
    forever = threading.Event()
    with answering(lambda request: forever.wait() and None) as server:
        tally = opened(server, rate=20, seconds=0.5, timeout=0.2)
        assert tally.outcomes == {TIMED_OUT: 10}
        assert min(tally.latencies) >= 0.2
        assert tally.carried == 0
        waited = closed_loop(server.address, REQUESTS, 2, begin=time.monotonic(), warm=0.5, seconds=0.2, timeout=30)
        assert waited.outcomes == {UNANSWERED: 2}
        impatient = closed(server, seconds=0.6, timeout=0.1)
        assert impatient.outcomes[TIMED_OUT] >= 2
        forever.set()


def test_what_warms_the_server_up_is_not_counted(answering):
    with answering(lambda request: OK) as server:
        arrivals = [0.0, 0.01, 0.02, 0.35, 0.4]
        tally = open_loop(server.address, REQUESTS, arrivals, begin=time.monotonic(), warm=0.3, seconds=0.2)
        assert len(server.asked) == 5
        assert tally.outcomes == {"200": 2}
        before = len(server.asked)
        counted = closed_loop(server.address, REQUESTS, 1, begin=time.monotonic(), warm=0.2, seconds=1.0)
    assert 0 < counted.outcomes["200"] < len(server.asked) - before


def test_a_client_that_is_late_still_measures_for_as_long(answering):
    with answering(lambda request: OK) as server:
        options = {"begin": time.monotonic() - 60, "warm": 0.1}
        assert closed_loop(server.address, REQUESTS, 1, seconds=1.0, **options).carried > 0
        assert open_loop(server.address, REQUESTS, [0.2, 0.3], seconds=5.0, **options).carried == 2
