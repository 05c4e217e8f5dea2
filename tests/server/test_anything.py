"""Whatever is sent, the answer is JSON and never says that the server broke."""

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**25), 10**25),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=3),
)
ROW = st.lists(st.floats(-1e39, 1e39), min_size=8, max_size=8)
ANY = st.recursive(
    SCALARS,
    lambda c: st.lists(c, max_size=4) | st.dictionaries(st.sampled_from(["x", "y", "ids", ""]), c, max_size=2),
    max_leaves=8,
)
INSTANCES = st.lists(ANY | ROW | st.fixed_dictionaries({"x": ROW | ANY}), max_size=4)
PREDICT = ANY | st.fixed_dictionaries(
    {"instances": INSTANCES | ANY},
    optional={"max_exit": ANY, "operating_point": ANY, "timeout": ANY, "probabilities": st.booleans() | ANY},
)
TENSOR = st.fixed_dictionaries(
    {
        "name": st.just("x") | ANY,
        "shape": st.just([1, 8]) | st.lists(st.integers(-1, 2**70), max_size=3) | ANY,
        "datatype": st.sampled_from(["FP32", "INT64", "BOOL", "FP16", "BYTES", "fp32"]) | ANY,
    },
    optional={"data": ROW | st.lists(ANY, max_size=9) | ANY, "parameters": ANY},
)
INFER = ANY | st.fixed_dictionaries(
    {"inputs": st.lists(TENSOR, max_size=2) | ANY},
    optional={
        "outputs": st.lists(st.fixed_dictionaries({"name": st.sampled_from(["exit", "class"]) | ANY}), max_size=2)
        | ANY,
        "parameters": st.dictionaries(st.sampled_from(["max_exit", "timeout", "priority", "operating_point"]), ANY)
        | ANY,
        "id": ANY,
    },
)


@pytest.mark.parametrize(("path", "bodies"), [("/v1/predict", PREDICT), ("/v2/models/rows/infer", INFER)])
def test_any_json_is_answered_or_refused(client, path, bodies):
    @settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
    @given(bodies)
    def check(body):
        reply = client.post(path, json=body)
        # A generated timeout may be so short that it passes.
        assert reply.status_code in (200, 400) or (reply.status_code == 503 and "timeout" in reply.text), reply.text
        assert ("error" in reply.json()) == (reply.status_code != 200)

    check()


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(body=st.binary(max_size=200), encoding=st.sampled_from(["identity", "gzip", "deflate", "br"]))
def test_any_bytes_are_refused(client, body, encoding):
    reply = client.post("/v1/predict", content=body, headers={"Content-Encoding": encoding})
    assert reply.status_code == 400
    assert list(reply.json()) == ["error", "request_id"]
