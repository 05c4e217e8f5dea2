import math

import numpy as np
import pytest


def ask(client, instances, status=200, **options):
    reply = client.post("/v1/predict", json={"instances": instances, **options})
    assert reply.status_code == status, reply.text
    return reply.json()


def test_the_answers_are_the_cascades_in_the_order_of_the_instances(client, rows, x):
    answer = ask(client, x.tolist(), probabilities=True)
    out = rows.predict({"x": x}, fetch=("probabilities",))
    got = answer["predictions"]
    assert [p["label"] for p in got] == out.label.tolist()
    assert [p["exit"] for p in got] == out.exit.tolist()
    assert [p["exit_name"] for p in got] == [f"exit_{j}" for j in out.exit]
    assert [p["abstain"] for p in got] == out.abstain.tolist()
    assert [p["flops"] for p in got] == out.flops.tolist()
    assert [p["class"] for p in got] == [rows.classes[label] for label in out.label]
    np.testing.assert_allclose([p["confidence"] for p in got], out.confidence, atol=1e-6)
    np.testing.assert_allclose([p["probabilities"] for p in got], out.probabilities, atol=1e-6)
    assert len(set(out.exit.tolist())) > 1  # or this proves little
    assert (answer["model"], answer["version"], answer["operating_point"]) == ("rows", "1", "balanced")


def test_instances_may_be_objects_or_the_bare_value_of_a_single_input(client, x):
    bare = ask(client, x.tolist())["predictions"]
    assert ask(client, [{"x": row} for row in x.tolist()])["predictions"] == bare


def test_probabilities_come_only_when_asked_for(client, x):
    assert "probabilities" not in ask(client, x[:1].tolist())["predictions"][0]


def test_every_request_has_an_id_of_its_own(client, x):
    ids = {ask(client, x[:1].tolist())["request_id"] for _ in range(3)}
    assert len(ids) == 3


def test_a_request_names_its_operating_point(client, rows, x):
    for name in ("full", "balanced", "fast"):
        answer = ask(client, x.tolist(), operating_point=name)
        assert answer["operating_point"] == name
        assert [p["exit"] for p in answer["predictions"]] == rows.at(name).predict({"x": x}).exit.tolist()


@pytest.mark.parametrize("max_exit", [0, 1, 2])
def test_max_exit_moves_later_leavers_there_and_leaves_the_others_alone(client, rows, x, max_exit):
    out = rows.predict({"x": x})
    records = rows.record({"x": x})
    got = ask(client, x.tolist(), max_exit=max_exit)["predictions"]
    assert [p["exit"] for p in got] == np.minimum(out.exit, max_exit).tolist()
    assert [p["label"] for p in got] == [int(records.label[p["exit"], k]) for k, p in enumerate(got)]


def test_max_exit_runs_no_block_behind_it(rows, serve, x):
    with serve(rows) as server, server.client() as client:
        ask(client, x.tolist(), max_exit=0, operating_point="full")
        assert server.metric("flops_executed_total", block="0") > 0
        assert server.metric("flops_executed_total", block="1") == 0


def test_rows_of_different_lengths_are_answered_in_order(tokens_server, tokens):
    rng = np.random.default_rng(3)
    lengths = rng.integers(1, 9, size=30).tolist()
    ids = [rng.integers(0, 50, size=n).tolist() for n in lengths]
    with tokens_server.client() as client:
        got = ask(client, [{"ids": row, "mask": [1] * len(row)} for row in ids])["predictions"]
    for row, prediction in zip(ids, got, strict=True):
        alone = tokens.predict({"ids": [row], "mask": [[1] * len(row)]})
        assert prediction["label"] == alone.label[0]
        assert prediction["flops"] == alone.flops[0]
        assert math.isclose(prediction["confidence"], alone.confidence[0], abs_tol=1e-6)


def test_no_instances_are_no_predictions(client, tokens_server):
    assert ask(client, [])["predictions"] == []
    with tokens_server.client() as other:
        assert ask(other, [])["predictions"] == []


def test_ten_thousand_rows_are_one_request(client, rows):
    x = np.random.default_rng(1).normal(size=(10_000, 8)).astype(np.float32)
    got = ask(client, x.tolist())["predictions"]
    assert [p["label"] for p in got] == rows.predict({"x": x}).label.tolist()


def test_equal_rows_have_equal_answers(client, x):
    got = ask(client, [x[0].tolist()] * 300)["predictions"]
    assert all(p["label"] == got[0]["label"] and p["exit"] == got[0]["exit"] for p in got)


def test_class_names_come_back_as_they_are(client, rows, x):
    names = {p["class"] for p in ask(client, np.concatenate([x, -3 * x, 5 * x]).tolist())["predictions"]}
    assert names <= set(rows.classes)
    assert any(not name.isascii() or '"' in name for name in names)


def test_logits_that_are_not_numbers_make_valid_json(client, x):
    # 1e38 is finite, but the model overflows on it.
    got = ask(client, [x[0].tolist(), [1e38] + [0.0] * 7], probabilities=True)["predictions"]
    assert got[0]["label"] >= 0
    assert got[1]["label"] == -1
    assert got[1]["class"] is None
    assert got[1]["confidence"] is None
    assert got[1]["abstain"] is True
    assert got[1]["probabilities"] == [None] * 5


@pytest.mark.parametrize("field", ["operating_point", "max_exit", "timeout", "probabilities"])
def test_null_is_as_absent(client, x, field):
    without = ask(client, x[:3].tolist())
    assert ask(client, x[:3].tolist(), **{field: None})["predictions"] == without["predictions"]


@pytest.mark.parametrize("timeout", [10**20, 10**300, 1e308, 1e15])
def test_a_timeout_longer_than_clocks_count_is_a_long_one(client, x, timeout):
    assert len(ask(client, x[:2].tolist(), timeout=timeout)["predictions"]) == 2


ROW = [0.0] * 8


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("3.4028235e+38", 3.4028234663852886e38),
        ("-3.4028235e+38", -3.4028234663852886e38),
        ("3.4028234663852886e+38", 3.4028234663852886e38),
        ("340282346638528859811704183484516925440", 3.4028234663852886e38),
        ("100000000000000000000", 1e20),  # as JavaScript writes it
        ("-100000000000000000000", -1e20),
        ("18446744073709551616", 2.0**64),
    ],
)
@pytest.mark.parametrize("beside", ["0", "0.5", "-1", "9223372036854775808"])
def test_float32s_largest_numbers_are_taken_however_they_are_written(client, rows, written, meant, beside):
    body = f'{{"instances": [[0.25, {written}, {beside}, 0, 0, 0, 0, 0]]}}'
    reply = client.post("/v1/predict", content=body)
    assert reply.status_code == 200, reply.text
    expected = rows.predict({"x": np.array([[0.25, meant, float(beside), 0, 0, 0, 0, 0]], np.float32)})
    assert reply.json()["predictions"][0]["label"] == expected.label[0]


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({}, "instances"),
        ([], "object"),
        ({"instances": {"x": ROW}}, "$.instances"),
        ({"instances": [ROW], "operatingpoint": "fast"}, "operatingpoint"),
        ({"instances": [ROW], "operating_point": "fastest"}, "'fast'"),
        ({"instances": [ROW], "operating_point": 1}, "operating_point"),
        ({"instances": [ROW], "max_exit": 3}, "0 to 2"),
        ({"instances": [ROW], "max_exit": -1}, "0 to 2"),
        ({"instances": [ROW], "max_exit": True}, "max_exit"),
        ({"instances": [ROW], "timeout": 0}, "timeout"),
        ({"instances": [ROW], "timeout": "1"}, "timeout"),
        ({"instances": [ROW], "probabilities": "yes"}, "probabilities"),
        ({"instances": [{"y": ROW}]}, "instances[0] lacks 'x'"),
        ({"instances": [ROW, {"x": ROW, "y": 1}]}, "instances[1] has 'y'"),
        ({"instances": [ROW[:7]]}, "axis 1 is 7"),
        ({"instances": [ROW, ROW[:7]]}, "instances[1]"),
        ({"instances": [[ROW]]}, "instances.x has the shape [1, 8]"),
        ({"instances": [1]}, "instances.x has the shape []"),
        ({"instances": [[[0.0], *ROW[1:]]]}, "ragged"),
        ({"instances": [["a", *ROW[1:]]]}, "a string"),
        ({"instances": [["1", *ROW[1:]]]}, "a string"),
        ({"instances": [[None, *ROW[1:]]]}, "null"),
        ({"instances": [None]}, "null"),
        ({"instances": [[{}, *ROW[1:]]]}, "an object"),
        ({"instances": [[1e39, *ROW[1:]]]}, "float32 can't hold"),
        ({"instances": [[10**40, *ROW[1:]]]}, "has 1e+40, which float32 can't hold"),
        ({"instances": [[-(10**400), *ROW[1:]]]}, "holds the number -1000000000"),
        ({"instances": [[10**30, "1", *ROW[2:]]]}, "holds the number 1000000000"),
        ({"instances": [[-3.4028236e38, *ROW[1:]]]}, "float32 can't hold"),
        ({"instances": [ROW, [*ROW[:7], 1e39]]}, "instances[1].x has 1e+39"),
        ({"instances": [ROW, [*ROW[:7], None]]}, "instances[1].x holds null"),
        ({"instances": [ROW] * 57 + [[*ROW[:7], "a"], [*ROW[:7], None]]}, "instances[57].x holds a string"),
        ({"instances": [ROW], "timeout": 10**400}, "$.timeout"),
        ({"instances": [ROW], "timeout": -(10**300)}, "timeout is -1e+15"),
        ({"instances": [ROW], "max_exit": 10**400}, "max_exit"),
    ],
)
def test_a_wrong_request_is_told_which_field_and_what_was_expected(client, body, named):
    reply = client.post("/v1/predict", json=body)
    assert reply.status_code == 400, reply.text
    assert list(reply.json()) == ["error", "request_id"]
    assert named in reply.json()["error"]


@pytest.mark.parametrize(
    ("instance", "named"),
    [
        ({"ids": [1, 2]}, "lacks 'mask'"),
        ([1, 2], "not an object"),
        ({"ids": [1, 2], "mask": [1]}, "seq"),
        ({"ids": [1.5, 2], "mask": [1, 1]}, "with a point"),
        ({"ids": [2**63, 2], "mask": [1, 1]}, "beyond int64"),
        ({"ids": [2**70, 2], "mask": [1, 1]}, "1180591620717411303424"),
        ({"ids": [], "mask": []}, "seq = 0"),
        ({"ids": [10**9, 2], "mask": [1, 1]}, "outside the vocabulary: expected 0 to 49"),
    ],
)
def test_a_wrong_instance_is_refused_and_the_next_request_is_answered(tokens_server, instance, named):
    good = {"ids": [1, 2], "mask": [1, 1]}
    with tokens_server.client() as client:
        reply = client.post("/v1/predict", json={"instances": [good, instance]})
        assert reply.status_code == 400, reply.text
        assert named in reply.json()["error"]
        ask(client, [good])
