"""wrk and oha: what they are given, and what they print as they printed it."""

import json
import math
import os
import stat
import sys

import pytest
from offramp.runtime.errors import OfframpError
from offramp.server.load import tools

BODIES = [b'{"instances":[1]}', b'{"instances":[22]}']
WRK = """\
Running 2s test @ http://127.0.0.1:8000/v1/predict
  1 threads and 16 connections
  Thread Stats   Avg      Stdev     Max   +/- Stdev
    Latency    15.02ms    4.11ms  61.20ms   87.31%
    Req/Sec     1.06k   120.11     1.25k    70.00%
  2120 requests in 2.00s, 800.10KB read
  Socket errors: connect 0, read 3, write 0, timeout 1
  Non-2xx or 3xx responses: 20
Requests/sec:   1058.12
Transfer/sec:    399.32KB
offramp {"microseconds":2003551,"requests":2120,"connect":0,"read":3,"write":0,"status":20,"timeout":1,\
"p50":15020,"p90":18800,"p99":40100}
"""
OHA = {
    "summary": {
        "successRate": 1.0, "total": 2.0, "slowest": 0.06, "fastest": 0.002, "average": 0.015,
        "requestsPerSec": 1060.5, "totalData": 63600, "sizePerRequest": 30, "sizePerSec": 31800.0,
    },
    "responseTimeHistogram": {"0.002": 1, "0.06": 2},
    "latencyPercentiles": {
        "p10": 0.01, "p25": 0.012, "p50": 0.015, "p75": 0.017, "p90": 0.0188, "p95": 0.02, "p99": 0.0401,
        "p99.9": 0.06, "p99.99": 0.06,
    },
    "rps": {"mean": 1060.0, "stddev": 1.0, "max": 1100.0, "percentiles": {}},
    "details": {},
    "statusCodeDistribution": {"200": 2100, "503": 20},
    "errorDistribution": {"aborted due to deadline": 16, "connection closed before message completed": 2},
}  # fmt: skip


@pytest.fixture
def program(tmp_path, monkeypatch):
    """`program("wrk", printed)` puts one on the PATH that prints that, and keeps what it was given."""

    def make(name, printed, code=0, help_=""):
        path, kept = tmp_path / name, tmp_path / f"{name}.json"
        path.write_text(
            f"#!{sys.executable}\nimport json, pathlib, sys\n"
            f"if sys.argv[1:] == ['--help']: sys.exit(print({help_!r}))\n"
            "named = [a for a in sys.argv[1:] if pathlib.Path(a).is_file()]\n"
            "scripts = [pathlib.Path(a).read_text() for a in named if a.endswith('.lua')]\n"
            "named += [text.split('[==[')[1].split(']==]')[0] for text in scripts]\n"
            "files = {a: pathlib.Path(a).read_bytes().decode() for a in named}\n"
            f"pathlib.Path({str(kept)!r}).write_text(json.dumps([sys.argv, files]))\n"
            f"print({printed!r}, end='')\nsys.exit({code})\n"
        )
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        return lambda: json.loads(kept.read_text())

    return make


def test_wrk_comes_before_oha_and_neither_need_be_there(program, monkeypatch):
    assert set(tools.found()) <= {"wrk", "oha"}
    program("oha", "")
    program("wrk", "")
    assert list(tools.found()) == ["wrk", "oha"]
    monkeypatch.setenv("PATH", "")
    assert tools.found() == {}


def test_wrk_is_given_all_bodies_and_believed(program):
    given = program("wrk", WRK)
    found = tools.wrk("http://127.0.0.1:8000", BODIES, 16, seconds=2, warm=0.5)
    argv, files = given()
    assert argv[argv.index("-c") + 1] == "16"
    assert argv[argv.index("-d") + 1] == "2s"
    assert argv[-1] == "http://127.0.0.1:8000/v1/predict"
    script, source = files.values()
    assert "function done" in script
    assert "@SOURCE@" not in script
    assert [body in source for body in ('\r\n\r\n{"instances":[1]}', '\r\n\r\n{"instances":[22]}')] == [True, True]
    size, _, rest = source.partition("\n")
    assert rest[: int(size)].startswith("POST /v1/predict HTTP/1.1\r\n")
    assert rest[: int(size)].endswith(BODIES[0].decode())
    assert (found.client, found.carried, found.seconds) == ("wrk", 2100, 2.003551)
    assert found.outcomes == {"2xx or 3xx": 2100, "4xx or 5xx": 20, "hung up": 3, "timed out": 1}
    assert [found.ms(q) for q in (0.5, 0.9, 0.99)] == [15.02, 18.8, 40.1]


def test_a_wrk_that_got_no_answer_has_no_latency():
    line = (
        'offramp {"microseconds":1e6,"requests":0,"connect":16,"read":0,"write":0,"status":0,"timeout":0,"p50":0,'
        '"p90":0,"p99":0}'
    )
    found = tools.read_wrk(line, 0.0)
    assert found.outcomes == {"refused": 16}
    assert math.isnan(found.ms(0.5))


@pytest.mark.parametrize("output", ["--output-format <OUTPUT_FORMAT>", "  -j, --json"])
def test_oha_is_given_all_bodies_and_believed(program, output):
    given = program("oha", json.dumps(OHA), help_=f"  -Z <BODY_PATH_LINES>\n{output}")
    found = tools.oha("http://127.0.0.1:8000", BODIES, 16, seconds=2, warm=0)
    argv, files = given()
    assert ("-j" in argv) == ("--json" in output)
    assert argv[argv.index("-Z") + 1] in files
    assert list(files.values()) == ['{"instances":[1]}\n{"instances":[22]}\n']
    assert (found.client, found.carried, found.seconds) == ("oha", 2100, 2.0)
    assert found.outcomes == {"200": 2100, "503": 20, "connection closed before message completed": 2}
    assert [found.ms(q) for q in (0.5, 0.9, 0.99)] == pytest.approx([15.0, 18.8, 40.1])


def test_an_oha_that_knows_one_body_is_used_for_one_body_only(program):
    given = program("oha", json.dumps(OHA), help_="-j, --json")
    with pytest.raises(OfframpError, match="one row again and again"):
        tools.oha("http://127.0.0.1:8000", BODIES, 16, seconds=2, warm=0)
    tools.oha("http://127.0.0.1:8000", BODIES[:1] * 3, 16, seconds=2, warm=0)
    argv, files = given()
    assert files[argv[argv.index("-D") + 1]] == '{"instances":[1]}'


def test_what_a_program_says_of_its_failure_is_handed_on(program):
    program("wrk", "unable to connect to 127.0.0.1:8000 Connection refused\n", code=1)
    with pytest.raises(OfframpError, match="wrk ended with 1: unable to connect"):
        tools.wrk("http://127.0.0.1:8000", BODIES, 16, seconds=1, warm=0)
    for read, name in ((tools.read_wrk, "wrk"), (lambda text, busy: tools.read_oha(text, busy, 1.0), "oha")):
        with pytest.raises(OfframpError, match=f"{name} printed 'usage"):
            read("usage: …", 0.0)
