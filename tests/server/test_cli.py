import os
import re
import signal
import socket
import threading
from contextlib import ExitStack
from importlib.metadata import version

import httpx
import pytest
from offramp.runtime import InputError
from offramp.server import Settings, create_app
from offramp.server.cli import listen as bind
from offramp.server.cli import serve
from offramp.server.connections.draining import DrainingServer


def address_of(process):
    """The address that `offramp serve` prints, and the rest of what it says."""
    first, second = process.stdout.readline(), process.stdout.readline()
    found = re.search(r"http://\S+:\d+", first)
    assert found, first + second + process.stderr.read()
    return found[0], first + second


def test_it_says_where_it_listens_and_which_operating_points_there_are(offramp_serve, rows_bundle):
    process = offramp_serve(rows_bundle, "--port", 0, "--operating-point", "balanced", "--threads", 1)
    address, said = address_of(process)
    assert "'balanced'" in said
    assert "full, fast" in said
    assert (
        process.stdout.readline()
        == f"runs on onnxruntime {version('onnxruntime')}, ['CPUExecutionProvider'], 1 threads\n"
    )
    points = httpx.get(f"{address}/v1/operating-points").json()
    assert points["operating_point"] == "balanced"
    assert list(points["operating_points"]) == ["full", "balanced", "fast"]
    assert points["operating_points"]["full"]["thresholds"] == ["inf", "inf", "-inf"]
    assert points["operating_points"]["fast"]["expected"] == {"coverage": 0.9}


def test_settings_come_from_the_environment_and_arguments_win(offramp_serve, rows_bundle, x):
    env = {
        **os.environ,
        "OFFRAMP_BUNDLE": str(rows_bundle),
        "OFFRAMP_PORT": "0",
        "OFFRAMP_MAX_ROWS_PER_REQUEST": "3",
        "OFFRAMP_OPERATING_POINT": "fast",
    }
    address, said = address_of(offramp_serve("--operating-point", "balanced", env=env))
    assert "'balanced'" in said
    assert httpx.post(f"{address}/v1/predict", json={"instances": x[:4].tolist()}).status_code == 413


def test_a_busy_port_is_one_line_and_exit_code_2(offramp_serve, rows_bundle):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = offramp_serve(rows_bundle, "--port", port)
        said = process.communicate(timeout=60)[1]
    assert process.returncode == 2
    assert len(said.splitlines()) == 1
    assert str(port) in said


def test_the_second_of_two_servers_that_were_bound_to_one_port_before_either_listened_is_told(rows_bundle):
    with bind("127.0.0.1", 0)[0] as first:
        port = first.getsockname()[1]
        with bind("127.0.0.1", port)[0] as second:
            first.listen()
            with pytest.raises(InputError, match=f"can't listen on 127.0.0.1 port {port}: Address already in use"):
                serve(Settings.of(bundle=rows_bundle, threads=1), [second])


@pytest.fixture
def two_addresses(monkeypatch):
    """A name that has this machine's IPv4 and its IPv6 loopback, as localhost mostly does."""
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            pytest.skip("no IPv6 loopback here")
    real = socket.getaddrinfo

    def both(host, port, *more, **options):
        if host != "both":
            return real(host, port, *more, **options)
        return [
            (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", port, 0, 0)),
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port)),
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port)),  # /etc/hosts may have a line twice
        ]

    monkeypatch.setattr(socket, "getaddrinfo", both)
    return "both"


def test_a_name_of_two_addresses_is_listened_on_at_both_and_one_port(two_addresses, rows, eventually):
    port = 0  # a free one; and then that one by its number
    for _ in range(2):
        with ExitStack() as stack:
            listeners = [stack.enter_context(one) for one in bind(two_addresses, port)]
            port = listeners[0].getsockname()[1]
            assert [one.getsockname()[:2] for one in listeners] == [("::1", port), ("127.0.0.1", port)]
            settings = Settings.of(log_level="error")
            server = DrainingServer(create_app(rows, settings), settings, "")
            thread = threading.Thread(target=server.run, kwargs={"sockets": listeners})
            thread.start()
            try:
                eventually(lambda server=server: server.started)
                for address in ("[::1]", "127.0.0.1"):
                    assert httpx.get(f"http://{address}:{port}/v2/health/live").status_code == 200
            finally:
                server.should_exit = True
                thread.join()


@pytest.mark.parametrize("taken", [("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)])
def test_a_port_that_is_busy_at_one_of_two_addresses_is_said_and_none_is_kept(two_addresses, taken):
    address, family = taken
    with socket.create_server((address, 0), family=family) as other:
        port = other.getsockname()[1]
        with pytest.raises(InputError, match=f"port {port}: Address already in use"):
            bind(two_addresses, port)
    for one in bind(two_addresses, port):  # nothing of the first try is left
        one.close()


def test_localhost_is_every_address_that_it_has_here():
    wanted = {address[0] for *_, address in socket.getaddrinfo("localhost", 0, type=socket.SOCK_STREAM)}
    listeners = bind("localhost", 0)
    assert {one.getsockname()[0] for one in listeners} == wanted
    assert len({one.getsockname()[1] for one in listeners}) == 1
    for one in listeners:
        one.close()


@pytest.mark.parametrize("lacking", [(socket.AF_INET6, ("2001:db8::1", 0, 0, 0)), (socket.AF_INET, ("192.0.2.1", 0))])
def test_an_address_that_this_machine_lacks_is_passed_over_if_another_is_there(monkeypatch, lacking):
    family, address = lacking
    missing = (family, socket.SOCK_STREAM, 6, "", address)
    here = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))
    for found in ([missing, here], [here, missing]):
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, found=found, **__: found)
        (only,) = bind("some", 0)
        assert only.getsockname()[0] == "127.0.0.1"
        only.close()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [missing])
    with pytest.raises(InputError, match="can't listen on some port 0: "):
        bind("some", 0)


def test_kubernetes_variables_and_empty_ones_are_as_unset(offramp_serve, rows_bundle):
    kubernetes = {
        "OFFRAMP_SERVICE_HOST": "10.0.0.7",
        "OFFRAMP_SERVICE_PORT": "8000",
        "OFFRAMP_PORT": "tcp://10.0.0.7:8000",
        "OFFRAMP_PORT_8000_TCP": "tcp://10.0.0.7:8000",
        "OFFRAMP_PORT_8000_TCP_ADDR": "10.0.0.7",
    }
    env = {**os.environ, **kubernetes, "OFFRAMP_THREADS": "", "OFFRAMP_LOG_LEVEL": " "}
    address, _ = address_of(offramp_serve(rows_bundle, "--port", 0, env=env))
    assert httpx.get(f"{address}/v2/health/ready").status_code == 200


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "nowhere"),
        ([], "bundle"),
        (["{bundle}", "--operating-point", "quick"], "'quick'"),
        (["{bundle}", "--threads", "0"], "threads"),
        (["{bundle}", "--port", "http"], "port"),
        (["{bundle}", "--port", "70000"], "port"),
        (["{bundle}", "--timeout", "-1"], "timeout"),
        (["{bundle}", "--max-queued-rows", "0"], "max_queued_rows"),
        (["{bundle}", "--host", "no.such.host.invalid"], "no.such.host.invalid"),
    ],
)
def test_what_is_wrong_is_one_line_and_exit_code_2(offramp_serve, rows_bundle, arguments, said):
    process = offramp_serve(*(a.format(bundle=rows_bundle) for a in arguments))
    error = process.communicate(timeout=60)[1]
    assert process.returncode == 2
    assert len(error.splitlines()) == 1, error
    assert said in error


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_an_idle_server_with_exit_code_0(offramp_serve, rows_bundle, sig):
    process = offramp_serve(rows_bundle, "--port", 0)
    address_of(process)
    process.send_signal(sig)
    error = process.communicate(timeout=60)[1]
    assert process.returncode == 0, error
    assert error == ""


def asking(address, rows, replies):
    """A thread that sends one long request and keeps the status of its answer."""

    def ask():
        try:
            reply = httpx.post(f"{address}/v1/predict", json={"instances": [[0.5] * 8] * rows}, timeout=120)
            replies.append((reply.status_code, reply.text.count('"label":')))
        except httpx.HTTPError:
            replies.append("cut off")

    thread = threading.Thread(target=ask)
    thread.start()
    return thread


def value(client, name):
    """A metric of block 0."""
    return float(re.search(rf'^offramp_{name}{{block="0".*}} (\S+)', client.get("/metrics").text, re.MULTILINE)[1])


def test_sigterm_fails_readiness_answers_what_is_here_and_exits_0(offramp_serve, slow_bundle, eventually):
    process = offramp_serve(slow_bundle, "--port", 0, "--threads", 1)
    address, _ = address_of(process)
    replies = []
    with httpx.Client(base_url=address, timeout=60) as client:
        running = asking(address, 3000, replies)
        eventually(lambda: value(client, "queue_duration_seconds_count") == 1)
        waiting = asking(address, 3000, replies)
        eventually(lambda: value(client, "queue_duration_seconds_count") == 2)
        process.send_signal(signal.SIGTERM)
        eventually(lambda: client.get("/v2/health/ready").status_code == 503)
        assert client.get("/v2/health/live").status_code == 200
        refused = client.post("/v1/predict", json={"instances": [[0.5] * 8]})
        assert refused.status_code == 503
        assert "retry-after" in refused.headers
        assert replies == []
    for thread in (running, waiting):
        thread.join()
    assert replies == [(200, 3000)] * 2
    assert process.wait(timeout=60) == 0
    assert process.stderr.read() == ""


def test_a_second_signal_ends_it_without_the_answers(offramp_serve, slow_bundle, eventually):
    process = offramp_serve(slow_bundle, "--port", 0, "--threads", 1)
    address, _ = address_of(process)
    replies = []
    with httpx.Client(base_url=address, timeout=60) as client:
        running = asking(address, 16_000, replies)  # many seconds
        eventually(lambda: value(client, "queue_duration_seconds_count") == 1)
        process.send_signal(signal.SIGTERM)
        eventually(lambda: client.get("/v2/health/ready").status_code == 503)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    running.join()
    assert replies != [(200, 16_000)]
