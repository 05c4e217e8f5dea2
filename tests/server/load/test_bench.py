"""The load bench against real offramp servers, and against servers that are none."""

import json

import httpx
import numpy as np
import pytest
from offramp.runtime.cli import main
from offramp.runtime.errors import InputError
from offramp.runtime.jobs.plain_json import to_json
from offramp.server.load import tools
from offramp.server.load.arrivals import Closed, Poisson, Trace, poisson
from offramp.server.load.bench import document, load_bench
from offramp.server.load.describe import describe
from offramp.server.load.requests import bodies, read_rows
from offramp.server.load.target import target

QUICK = {"seconds": 1.0, "turns": 2, "client": "own", "processes": 1}


@pytest.fixture(scope="module")
def data(tmp_path_factory, rows):
    """Rows for the rows bundle, labelled as its last exit answers them, the first ten apart."""
    x = np.random.default_rng(5).normal(size=(40, 8)).astype(np.float32)
    labels = rows.at("full").predict({"x": x}).label.copy()
    labels[:10] = -1
    path = tmp_path_factory.mktemp("data") / "d.npz"
    np.savez(path, x=x, labels=labels)
    return path


@pytest.fixture(scope="module")
def found(rows_server, data):
    loads = [Poisson(share=0.5), Closed(2), Trace("t", (0.0, 0.1, 0.15))]
    return load_bench(rows_server.url, data, points=["fast"], loads=loads, **QUICK)


def test_points_take_turns_and_full_is_the_baseline(found):
    assert found.baseline == "full"
    assert [(line["kind"], line["point"]) for line in found.times] == [
        (kind, point) for kind in ("closed", "poisson", "trace") for point in ("full", "fast")
    ]
    for line in found.times:
        assert line["turns"] == 2
        assert line["errors"] == {}
        assert line["requests_per_second_low"] <= line["requests_per_second"] <= line["requests_per_second_high"]
        assert line["rows_per_second"] == line["requests_per_second"]
        assert 0 < line["p50_ms_low"] <= line["p50_ms"] <= line["p99_ms"]
        assert line["client"] == "offramp's own"
        if line["point"] == "full":
            assert line["requests_per_second_ratio"] == line["p99_ratio"] == 1
    closed, half = found.times[0], found.times[2]
    assert half["rate"] == pytest.approx(0.5 * closed["requests_per_second"])
    assert found.times[4]["requests"] == 6  # the trace, in each of two turns


def test_answers_are_those_of_the_runtime(found, data, rows):
    with np.load(data) as archive:
        x, labels = archive["x"], archive["labels"]
    for line in found.points:
        out = rows.at(line["point"]).predict({"x": x})
        assert line["labelled"] == 30
        assert line["accuracy"] == (out.label == labels)[10:].mean()
        assert line["coverage"] == (~out.abstain).mean()
        assert sum(line["exit_shares"]) == pytest.approx(1)


def test_it_is_told_in_text_and_in_json(found):
    text = describe(found)
    for word in ("full (baseline)", "fast", "p99 of full", "closed loop, by offramp's own", "50% of full", "trace t"):
        assert word in text
    told = json.loads(to_json(document(found)))
    assert told["schema"] == "offramp-load/1"
    assert told["baseline"] == "full"
    assert len(told["times"]) == 6


def test_rows_are_drawn_by_the_seed_and_sent_as_they_are(rows_server, data):
    server = target(rows_server.url)
    assert server.points == ["full", "balanced", "fast"]
    assert server.default == "balanced"
    picked, again, other = (read_rows(data, server, most=30, seed=seed) for seed in (0, 0, 1))
    assert (len(picked), picked.of) == (30, 40)
    assert picked.instances == again.instances != other.instances
    made = bodies(picked.instances, 4, "fast")
    assert len(made) == 7
    assert json.loads(made[0]) == {
        "instances": [json.loads(one) for one in picked.instances[:4]],
        "operating_point": "fast",
    }
    assert len(json.loads(bodies(picked.instances[:2], 5, "fast")[0])["instances"]) == 5
    with np.load(data) as archive:
        sent = {tuple(np.float32(json.loads(one)["x"])) for one in picked.instances}
        assert sent <= {tuple(row) for row in archive["x"]}


def test_texts_are_sent_as_texts(serve, tmp_path):
    pytest.importorskip("tokenizers")
    from offramp.runtime import Cascade
    from raw_bundles import text_bundle, word_tokenizer

    bundle = text_bundle(tmp_path / "b", word_tokenizer(tmp_path / "tokenizer.json"))
    table = tmp_path / "rows.csv"
    table.write_text("text,labels\nwhat is my balance,bank\nplay music,music\n")
    with Cascade.load(bundle, threads=1) as cascade, serve(cascade) as server:
        picked = read_rows(table, target(server.url))
        assert sorted(picked.instances) == [b'{"text":"play music"}', b'{"text":"what is my balance"}']
        assert sorted(picked.labels) == [0, 1]
        [line] = load_bench(server.url, table, loads=[Closed(1)], **QUICK).times
        assert line["errors"] == {}
        assert line["requests"] > 0


def test_a_full_queue_is_counted_and_reported(rows, data, serve):
    with serve(rows, max_rows_per_request=3) as server:
        found = load_bench(server.url, data, loads=[Closed(1)], rows=4, points=["full"], **QUICK)
    [line] = found.times
    assert set(line["errors"]) == {"413"}
    assert line["requests_per_second"] == 0
    assert line["p99_ms"] is None
    assert "full didn't answer (413" in found.notes[0]
    assert "413" in describe(found)


def test_a_server_that_refuses_everything_is_no_result(rows_server, data, capsys):
    own = ["--client", "own", "--processes", "1", "--seconds", "0.3", "--turns", "1", "--connections", "2"]
    assert main(["bench", rows_server.url, str(data), *own, "--rows", "20000"]) == 2
    told = capsys.readouterr()
    assert told.err.splitlines()[-1].startswith("offramp: the server answered no request in time under any load")
    assert " 413" in told.out
    assert "note: a request of 20000 rows at full got 413: " in told.out
    assert "this server takes 16384 at a time" in told.out


def test_few_arrivals_are_no_falling_behind(rows_server, data):
    rate, seconds = 20.0, 1.0
    few = next(s for s in range(1000) if (poisson(rate, 1.25 * seconds, [s, 0, 0]) > 0.25 * seconds).sum() < 0.8 * rate)
    quick = {**QUICK, "seconds": seconds, "turns": 1}
    found = load_bench(rows_server.url, data, points=["full"], loads=[Poisson(rate=rate)], seed=few, **quick)
    assert found.times[0]["requests_per_second"] < 0.95 * rate
    assert not any("fell behind" in note for note in found.notes)


@pytest.mark.slow
def test_a_server_that_dies_meanwhile_is_reported(answering, rows_server, data):
    """It says what it is, and then nothing more."""
    with httpx.Client(base_url=rows_server.url) as asked:
        known = {path: asked.get(path).content for path in ("/v1/operating-points", "/v2/models/rows")}

    def answer(request):
        body = known.get(request.split(b" ")[1].decode())
        return body and b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)

    with answering(answer) as server:
        found = load_bench(server.url, data, loads=[Closed(2), Poisson(share=0.7), Poisson(rate=50)], **QUICK)
    assert all(set(line["errors"]) == {"hung up"} for line in found.times)
    assert any("left out, for full carried nothing" in note for note in found.notes)
    assert "hung up" in describe(found)


def test_a_program_on_the_path_does_the_closed_loop_and_is_named(rows_server, data, monkeypatch):
    asked = []

    def wrk(url, bodies, connections, *, seconds, warm):
        asked.append((url, len(bodies), connections))
        line = (
            'offramp {"microseconds":1e6,"requests":100,"connect":0,"read":0,"write":0,"status":0,"timeout":0,'
            '"p50":1000,"p90":2000,"p99":3000}'
        )
        return tools.read_wrk(line, 0.95)

    monkeypatch.setattr(tools, "found", lambda: {"wrk": wrk})
    loads = [Closed(3), Poisson(rate=50)]
    found = load_bench(rows_server.url, data, points=["full"], loads=loads, **{**QUICK, "client": "auto"})
    assert asked == [(rows_server.url, 40, 3)] * 2
    assert [line["client"] for line in found.times] == ["wrk", "offramp's own"]
    assert any("the client was the bottleneck (95% of a core at full)" in note for note in found.notes)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("https://localhost:1", "without TLS"),
        ("http://localhost:1/v1", "without a path"),
        ("http://localhost:99999", "http://localhost:99999: "),
        ("http://127.0.0.1:1", r"can't be reached \("),
    ],
)
def test_an_address_where_no_server_is_says_so(url, message):
    with pytest.raises(InputError, match=message):
        target(url)


def test_another_servers_answers_are_not_taken_for_offramps(answering):
    for said in (b"no", b"{}", b"[]"):
        with (
            answering(lambda _, s=said: b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(s), s)) as server,
            pytest.raises(InputError, match="is it offramp's"),
        ):
            target(server.url)


def test_the_command_measures_an_address(rows_server, data, tmp_path, capsys):
    written = tmp_path / "load.json"
    arguments = ["bench", rows_server.url, str(data), "--operating-point", "fast", "--seconds", "1", "--turns", "1"]
    options = ["--connections", "1", "--rate", "30", "50%", "--client", "own", "--json", str(written)]
    assert main([*arguments, *options]) == 0
    assert "full (baseline)" in capsys.readouterr().out
    told = json.loads(written.read_text())
    assert [line["kind"] for line in told["times"][::2]] == ["closed", "poisson", "poisson"]
    assert str(tmp_path) not in json.dumps(told["machine"])


def test_the_command_serves_a_bundle_for_the_load(rows_bundle, data, capsys):
    options = ["--seconds", "1", "--turns", "1", "--rate", "20", "--threads", "1", "--client", "own", "--json"]
    assert main(["bench", str(rows_bundle), str(data), "--load", *options]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {line["kind"] for line in told["times"]} == {"poisson"}
    assert {line["point"] for line in told["times"]} == {"full", "balanced", "fast"}
    with pytest.raises(InputError, match="can't be reached"):
        target(told["address"])  # it was ended


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["b/", "--html", "/no/such/x.html"],
            "--html is '/no/such/x.html', which is in no folder: /no/such isn't there.",
        ),
        (["b/", "--html", "/"], "--html is '/', which is a folder. Expected the path of a file."),
        (["b/", "--json", "/no/such/x.json"], "--json is '/no/such/x.json', which is in no folder"),
        (["b/", "--rate", "5"], "--rate goes with a server's address, --load or --simulate."),
        (["http://localhost:1", "--pace", "5"], "--pace doesn't go with a server."),
        (["http://localhost:1", "--threads", "2"], "--threads goes with a bundle"),
        (["http://localhost:1", "--rate", "often"], "--rate is 'often', expected requests a second"),
        (["http://localhost:1", "--connections", "0"], "--connections is 0, expected at least 1."),
        (["http://localhost:1", "--rows", "0"], "rows is 0, expected at least 1."),
        (["http://localhost:1", "--seconds", "0"], "seconds is 0.0, expected more than 0."),
        (["http://localhost:1", "--client", "ab"], "client is 'ab', expected one of auto, own, wrk, oha."),
        (["http://localhost:1"], "can't be reached"),
    ],
)
def test_what_doesnt_fit_is_one_line_and_exit_code_2(options, message, capsys):
    first, *others = options
    assert main(["bench", first, "d.npz", *others]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_a_point_that_the_server_lacks_is_named(rows_server, data):
    with pytest.raises(InputError, match="operating_point is 'quick', expected one of"):
        load_bench(rows_server.url, data, points=["quick"], **QUICK)
