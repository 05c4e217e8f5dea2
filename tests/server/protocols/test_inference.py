"""The Open Inference Protocol, with plain requests and with Triton's own client."""

import numpy as np
import pytest
from offramp.runtime import InputError
from offramp.server.protocols.tensors import numbers

MODEL = "/v2/models/rows"


def tensor(x, **fields):
    return {"name": "x", "shape": list(x.shape), "datatype": "FP32", "data": x.ravel().tolist(), **fields}


def infer(client, body, status=200, path=MODEL):
    reply = client.post(f"{path}/infer", json=body)
    assert reply.status_code == status, reply.text
    return reply.json()


def by_name(answer):
    return {output["name"]: output["data"] for output in answer["outputs"]}


def test_live_ready_and_metadata(client):
    assert client.get("/v2/health/live").json() == {"live": True}
    assert client.get("/v2/health/ready").json() == {"ready": True}
    assert client.get("/v2").json()["name"] == "offramp"
    for path in (MODEL, f"{MODEL}/versions/1"):
        described = client.get(path).json()
        assert described["name"] == "rows"
        assert described["versions"] == ["1"]
        assert described["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 8]}]
        assert {"name": "label", "datatype": "INT64", "shape": [-1]} in described["outputs"]
        assert {"name": "involuntary", "datatype": "BOOL", "shape": [-1]} in described["outputs"]
        assert {"name": "probabilities", "datatype": "FP32", "shape": [-1, 5]} in described["outputs"]
        assert client.get(f"{path}/ready").json() == {"name": "rows", "ready": True}


def test_the_outputs_are_the_cascades(client, rows, x):
    answer = infer(client, {"inputs": [tensor(x)]})
    out = rows.predict({"x": x})
    data = by_name(answer)
    assert list(data) == ["label", "class", "confidence", "exit", "abstain", "flops"]
    assert data["label"] == out.label.tolist()
    assert data["class"] == [rows.classes[label] for label in out.label]
    assert data["exit"] == out.exit.tolist()
    assert data["abstain"] == out.abstain.tolist()
    assert data["flops"] == out.flops.tolist()
    np.testing.assert_allclose(data["confidence"], out.confidence, atol=1e-6)
    assert all(output["shape"] == [len(x)] for output in answer["outputs"])
    assert (answer["model_name"], answer["model_version"]) == ("rows", "1")


def test_data_may_be_flat_or_nested(client, x):
    flat = infer(client, {"inputs": [tensor(x)]})
    assert infer(client, {"inputs": [tensor(x, data=x.tolist())]}) == flat


def test_only_the_outputs_that_were_asked_for_come_back_in_that_order(client, rows, x):
    answer = infer(client, {"inputs": [tensor(x)], "outputs": [{"name": "probabilities"}, {"name": "exit"}]})
    assert [output["name"] for output in answer["outputs"]] == ["probabilities", "exit"]
    assert answer["outputs"][0]["shape"] == [len(x), 5]
    np.testing.assert_allclose(
        answer["outputs"][0]["data"], rows.predict({"x": x}, fetch=("probabilities",)).probabilities, atol=1e-6
    )


def test_the_id_is_echoed_if_there_is_one(client, x):
    assert infer(client, {"inputs": [tensor(x)], "id": "número 1"})["id"] == "número 1"
    assert "id" not in infer(client, {"inputs": [tensor(x)]})


@pytest.mark.parametrize("milliseconds", [60_000, 60_000.5])
def test_a_deadline_may_have_a_fraction(client, x, milliseconds):
    answer = infer(client, {"inputs": [tensor(x)], "parameters": {"deadline_ms": milliseconds}})
    assert by_name(answer)["label"] == by_name(infer(client, {"inputs": [tensor(x)]}))["label"]


def test_parameters_choose_the_operating_point_and_the_last_exit(client, rows, x):
    parameters = {"operating_point": "full", "max_exit": 1, "priority": 1, "timeout": 60_000_000}
    answer = infer(client, {"inputs": [tensor(x)], "parameters": parameters})
    assert set(by_name(answer)["exit"]) == {1}
    assert by_name(answer)["label"] == rows.record({"x": x}).label[1].tolist()
    assert answer["parameters"] == {"operating_point": "full"}


@pytest.mark.parametrize("timeout", [10**12, 10**20, 10**400])
def test_a_timeout_longer_than_clocks_count_is_a_long_one(client, x, timeout):
    assert by_name(infer(client, {"inputs": [tensor(x)], "parameters": {"timeout": timeout}}))["label"]


@pytest.mark.parametrize(
    "nulls",
    [
        {"parameters": None},
        {"outputs": None},
        {"id": None},
        {"parameters": {"operating_point": None, "max_exit": None, "timeout": None, "priority": None}},
        {"outputs": [{"name": n, "parameters": None} for n in ("label", "class", "confidence", "exit")]},
        {"inputs": {"parameters": None}},
    ],
)
def test_null_is_as_absent(client, x, nulls):
    body = {"inputs": [tensor(x, **nulls.get("inputs", {}))], **{k: v for k, v in nulls.items() if k != "inputs"}}
    without = by_name(infer(client, {"inputs": [tensor(x)]}))
    answered = by_name(infer(client, body))
    assert answered == {name: without[name] for name in answered}
    assert {"label", "class"} <= answered.keys()


@pytest.mark.parametrize("size", ["3.4028235e+38", "-3.4028235e+38", "100000000000000000000"])
@pytest.mark.parametrize("datatype", ["FP32", "FP64"])
def test_float32s_largest_numbers_are_taken_however_they_are_written(client, size, datatype):
    given = f'{{"name": "x", "shape": [1, 8], "datatype": "{datatype}", "data": [0, {size}, 0.5, 0, 0, 0, 0, 0]}}'
    reply = client.post(f"{MODEL}/infer", content=f'{{"inputs": [{given}]}}')
    assert reply.status_code == 200, reply.text


def test_no_rows_are_no_answers(client):
    answer = infer(client, {"inputs": [tensor(np.zeros((0, 8), np.float32))]})
    assert all(output["data"] == [] and output["shape"] == [0] for output in answer["outputs"])


def test_narrower_types_that_fit_are_taken(tokens_server, tokens):
    ids, mask = np.arange(10).reshape(2, 5), np.ones((2, 5), int)
    inputs = [
        {"name": "ids", "shape": [2, 5], "datatype": "UINT8", "data": ids.ravel().tolist()},
        {"name": "mask", "shape": [2, 5], "datatype": "BOOL", "data": [True] * 10},
    ]
    with tokens_server.client() as client:
        answer = infer(client, {"inputs": inputs}, path="/v2/models/tokens")
    assert by_name(answer)["label"] == tokens.predict({"ids": ids, "mask": mask}).label.tolist()


def test_json_without_a_content_type_is_taken(client, x):
    body = client.build_request("POST", f"{MODEL}/infer", json={"inputs": [tensor(x)]})
    del body.headers["content-type"]
    assert client.send(body).status_code == 200


def test_the_binary_extension_is_refused_by_name(client):
    reply = client.post(f"{MODEL}/infer", content=b"{}", headers={"Inference-Header-Content-Length": "2"})
    assert reply.status_code == 501
    assert "binary" in reply.json()["error"]


@pytest.mark.parametrize("path", ["/v2/models/other", f"{MODEL}/versions/2", "/v2/models/кот"])
@pytest.mark.parametrize("end", ["", "/ready", "/infer"])
def test_another_model_or_version_is_not_found(client, path, end):
    reply = client.request("POST" if end == "/infer" else "GET", path + end)
    assert reply.status_code == 404
    assert "this server has" in reply.json()["error"]


X = np.zeros((2, 8), np.float32)


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({}, "inputs"),
        ({"inputs": []}, "lacks 'x'"),
        ({"inputs": [tensor(X, name="y")]}, "'y'"),
        ({"inputs": [tensor(X), tensor(X)]}, "inputs[1] ('x')"),
        ({"inputs": [tensor(X, datatype="FP64", data=[1e39] * 16)]}, "numbers beyond float32's range"),
        ({"inputs": [tensor(X, datatype="UINT8", data=[1] * 16)]}, "uint8, expected float32"),
        ({"inputs": [tensor(X, datatype="BYTES")]}, "datatype"),
        ({"inputs": [tensor(X, datatype="INT32", data=[0.5] * 16)]}, "with a point"),
        ({"inputs": [tensor(X, datatype="INT8", data=[128] * 16)]}, "int8 can't hold"),
        ({"inputs": [tensor(X, shape=[2, 7])]}, "its shape says [2, 7]"),
        ({"inputs": [tensor(X, shape=[-2, -8])]}, "shape"),
        ({"inputs": [tensor(X, shape=[4, 4])]}, "axis 1 is 4"),
        ({"inputs": [tensor(X, shape=[16])]}, "has the shape [16]"),
        ({"inputs": [tensor(X, data=X.T.tolist())]}, "its shape says [2, 8]"),
        ({"inputs": [tensor(X, data=None)]}, "no data"),
        ({"inputs": [tensor(X, data="00")]}, "data"),
        ({"inputs": [tensor(X, data=[None] * 16)]}, "null"),
        ({"inputs": [tensor(X)], "outputs": [{"name": "logits"}]}, "outputs[0]"),
        ({"inputs": [tensor(X)], "outputs": [{"name": "exit"}, {"name": "exit"}]}, "outputs[1]"),
        ({"inputs": [tensor(X)], "parameters": {"operating_point": "no"}}, "operating_point"),
        ({"inputs": [tensor(X)], "parameters": {"operating_point": 3}}, "parameters.operating_point"),
        ({"inputs": [tensor(X)], "parameters": {"max_exit": 9}}, "max_exit"),
        ({"inputs": [tensor(X)], "parameters": {"max_exit": True}}, "parameters.max_exit"),
        ({"inputs": [tensor(X)], "parameters": {"timeout": 0}}, "parameters.timeout"),
        (
            {"inputs": [tensor(X)], "parameters": {"deadline_ms": True}},
            "parameters.deadline_ms is True, expected a",
        ),
        ({"inputs": [tensor(X)], "parameters": {"deadline_ms": "5"}}, "parameters.deadline_ms is '5', expected a"),
        ({"inputs": [tensor(X)], "parameters": {"priority": 10}}, "parameters.priority"),
        ({"inputs": [tensor(X)], "id": 7}, "id"),
        ({"inputs": [tensor(X, shape=[1] * 65, data=[1])]}, "shape"),
        ({"inputs": [tensor(X, shape=[2, 8] + [1] * 63)]}, "shape"),
        ({"inputs": [tensor(X, shape=[0, 2**70], data=[])]}, "shape"),
        ({"inputs": [tensor(X, shape=[2**62, 0, 2**62], data=[])]}, "shape"),
        ({"inputs": [tensor(X, shape=[10**400, 8])]}, "shape"),
        ({"inputs": [tensor(X, shape=None)]}, "shape"),
        ({"inputs": [tensor(X)], "parameters": {"timeout": -(10**400)}}, "parameters.timeout is -1e+15"),
        ({"inputs": [tensor(X)], "parameters": {"priority": 10**400}}, "parameters.priority"),
        ({"inputs": [tensor(X)], "parameters": {"max_exit": -(10**400)}}, "max_exit"),
        ({"inputs": [tensor(X)], "parameters": {"operating_point": 10**400}}, "parameters.operating_point"),
    ],
)
def test_a_wrong_request_is_told_which_field(client, body, named):
    reply = client.post(f"{MODEL}/infer", json=body)
    assert reply.status_code == 400, reply.text
    assert named in reply.json()["error"]


def test_logits_that_are_not_numbers_make_valid_json(client):
    x = np.array([[1e38] + [0] * 7], np.float32)
    answer = by_name(
        infer(client, {"inputs": [tensor(x)], "outputs": [{"name": n} for n in ("label", "class", "confidence")]})
    )
    assert answer == {"label": [-1], "class": [""], "confidence": [None]}


@pytest.fixture
def triton(rows_server):
    http = pytest.importorskip("tritonclient.http")
    with http.InferenceServerClient(rows_server.url.removeprefix("http://")) as client:
        yield http, client


def test_tritons_client_reads_health_and_metadata(triton):
    _, client = triton
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("rows")
    assert client.is_model_ready("rows", "1")
    assert client.get_server_metadata()["name"] == "offramp"
    assert client.get_model_metadata("rows")["inputs"][0]["shape"] == [-1, 8]


@pytest.mark.parametrize("compression", [None, "gzip", "deflate"])
def test_tritons_client_infers(triton, rows, x, compression):
    http, client = triton
    given = http.InferInput("x", x.shape, "FP32").set_data_from_numpy(x, binary_data=False)
    result = client.infer(
        "rows", [given], request_id="7", timeout=60_000_000, priority=1, request_compression_algorithm=compression
    )
    assert result.get_response()["id"] == "7"
    assert result.as_numpy("label").tolist() == rows.predict({"x": x}).label.tolist()
    assert result.as_numpy("class").dtype == object


def test_tritons_client_is_told_that_binary_tensors_are_not_spoken(triton, x):
    http, client = triton
    with pytest.raises(Exception, match="binary_data=False"):
        client.infer("rows", [http.InferInput("x", x.shape, "FP32").set_data_from_numpy(x)])


@pytest.mark.parametrize("data", [[0.5] * 600_000, [list(range(10))] * 60_000, [[True] * 300_000, [2.5] * 300_000]])
def test_numbers_that_are_converted_in_parts_are_as_numpy_makes_them_at_once(data):
    made = numbers(data, np.dtype(np.float32), "data")
    np.testing.assert_array_equal(made, np.asarray(data, np.float32))


@pytest.mark.parametrize(
    "last", ["a", None, [1, 2, 3], [], {}, 10**400], ids=["string", "null", "list", "empty", "object", "huge"]
)
def test_what_is_wrong_in_the_last_part_of_many_numbers_is_found(last):
    with pytest.raises(InputError, match=r"^data"):
        numbers([0.5] * 600_000 + [last], np.dtype(np.float32), "data")
