"""Texts and pictures over HTTP get the answers that the runtime gives them."""

import base64
import io
import json
import re

import numpy as np
import pytest
from offramp.runtime import Cascade

tokenizers = pytest.importorskip("tokenizers")
PIL = pytest.importorskip("PIL.Image")
pytest.importorskip("torch", reason="the bundles are exported here")

TEXTS = ["what is my balance", "play music", "", "is is is is is is is is", "é \U0001f600", "play my balance"]


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    from raw_bundles import text_bundle, word_tokenizer

    folder = tmp_path_factory.mktemp("texts")
    with Cascade.load(text_bundle(folder / "b", word_tokenizer(folder / "words.json"))) as cascade:
        yield cascade


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    from raw_bundles import picture_bundle

    with Cascade.load(picture_bundle(tmp_path_factory.mktemp("pictures"))) as cascade:
        yield cascade


def png(seed, size=(4, 6), kind="PNG"):
    made = io.BytesIO()
    PIL.fromarray(np.random.default_rng(seed).integers(0, 255, (*size, 3), np.uint8)).save(made, kind)
    return made.getvalue()


def in_base64(data):
    return base64.b64encode(data).decode()


def answers(cascade, rows):
    return [cascade.predict(cascade.preprocess([row])) for row in rows]


def same(found, expected):
    assert [p["label"] for p in found] == [int(out.label[0]) for out in expected]
    assert [p["exit"] for p in found] == [int(out.exit[0]) for out in expected]
    assert [p["flops"] for p in found] == [int(out.flops[0]) for out in expected]
    np.testing.assert_allclose([p["confidence"] for p in found], [out.confidence[0] for out in expected], atol=1e-5)


@pytest.mark.parametrize("wrap", [lambda text: text, lambda text: {"text": text}])
def test_texts_are_answered_as_by_the_runtime_in_their_order(serve, texts, wrap):
    with serve(texts) as server, server.client() as client:
        done = client.post("/v1/predict", json={"instances": [wrap(text) for text in TEXTS]})
        assert done.status_code == 200, done.text
        same(done.json()["predictions"], answers(texts, TEXTS))


@pytest.mark.parametrize("wrap", [lambda data: data, lambda data: {"b64": data}])
def test_pictures_are_answered_as_by_the_runtime(serve, pictures, wrap):
    files = [png(0), png(1, (40, 9)), png(2, kind="JPEG")]
    with serve(pictures) as server, server.client() as client:
        done = client.post("/v1/predict", json={"instances": [wrap(in_base64(data)) for data in files]})
        assert done.status_code == 200, done.text
        same(done.json()["predictions"], answers(pictures, files))


@pytest.mark.parametrize("shape", [[6], [6, 1], [1, 6]])
def test_bytes_in_the_inference_protocol(serve, texts, shape):
    tensor = {"name": "text", "datatype": "BYTES", "shape": shape, "data": TEXTS}
    with serve(texts) as server, server.client() as client:
        done = client.post(f"/v2/models/{texts.manifest.name}/infer", json={"inputs": [tensor]})
        assert done.status_code == 200, done.text
        found = {out["name"]: out["data"] for out in done.json()["outputs"]}
        assert found["label"] == [int(out.label[0]) for out in answers(texts, TEXTS)]
        assert found["class"] == [texts.classes[k] for k in found["label"]]


def test_arrays_go_on_as_before(serve, texts):
    inputs = texts.preprocess(TEXTS[:1])
    row = {name: values[0].tolist() for name, values in inputs.items()}
    with serve(texts) as server, server.client() as client:
        done = client.post("/v1/predict", json={"instances": [row]})
        same(done.json()["predictions"], answers(texts, TEXTS[:1]))
        assert client.post("/v1/predict", json={"instances": []}).json()["predictions"] == []


@pytest.mark.parametrize(
    ("instances", "message"),
    [
        (
            ["a", {"ids": [1], "mask": [1]}],
            r"instances\[1\] has \['ids', 'mask'\], expected a text.*as instances\[0\] is",
        ),
        (["a", None], r"instances\[1\] is null, expected a text.*as instances\[0\] is"),
        (["a", {"text": []}], r'instances\[1\]\["text"\] is a list, expected a text as a string'),
        ([{"text": 3}], r'instances\[0\]\["text"\] is 3, expected a text as a string'),
        ([{"text": None}, "a"], r'instances\[0\]\["text"\] is null, expected a text as a string'),
        (
            [{"txt": "a"}],
            r"""instances\[0\] has \['txt'\], expected a text, .*{"text": "…"}, .* inputs \['ids', 'mask'\]""",
        ),
        ([{"b64": "YQ=="}], r"instances\[0\] has \['b64'\], expected a text"),
        ([{"text": "a", "id": 7}], r"instances\[0\] has \['id', 'text'\], expected a text"),
        ([{}], r"instances\[0\] has \[\], expected a text"),
        ([5], r"instances\[0\] is 5, expected a text, as a string or"),
        ([[5], "a"], r"instances\[0\] is a list, expected a text"),
        ([True], r"instances\[0\] is true, expected a text"),
        ([{"ids": [1]}], r"instances\[0\] lacks 'mask'"),
        (["\ud800"], "request body: half a surrogate pair at the end of a string"),
        (["a" * 1_000_001], "instances: row 0 has 1000001 characters"),
    ],
)
def test_what_is_no_text_is_named(serve, texts, instances, message):
    with serve(texts, max_body_bytes=10_000_000) as server, server.client() as client:
        body = json.dumps({"instances": instances})
        done = client.post("/v1/predict", content=body, headers={"Content-Type": "application/json"})
        assert done.status_code == 400
        assert re.search(message, done.json()["error"])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("not base64!", "instances[0] isn't base64"),
        (in_base64(b"no picture"), "can't be read as a PNG or JPEG picture"),
        (in_base64(png(0)[:40]), "can't be read as a PNG or JPEG picture"),
        ("/etc/passwd", "instances[0] isn't base64"),
        ({"b64": 5}, 'instances[0]["b64"] is 5, expected a picture in base64 as a string'),
        ({"text": "a"}, "instances[0] has ['text'], expected a picture in base64, as a string or"),
    ],
)
def test_what_is_no_picture_is_named_and_no_path_is_opened(serve, pictures, data, message):
    with serve(pictures) as server, server.client() as client:
        done = client.post("/v1/predict", json={"instances": [data]})
        assert done.status_code == 400
        assert message in done.json()["error"]


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        ({"name": "words"}, "expected the name 'text'"),
        ({"shape": [2]}, "its data are 1 rows: expected [1]"),
        ({"data": [1]}, "data[0] is no string"),
    ],
)
def test_wrong_bytes_are_named(serve, texts, tensor, message):
    whole = {"name": "text", "datatype": "BYTES", "shape": [1], "data": ["a"]} | tensor
    with serve(texts) as server, server.client() as client:
        done = client.post(f"/v2/models/{texts.manifest.name}/infer", json={"inputs": [whole]})
        assert done.status_code == 400
        assert message in done.json()["error"]


def test_a_bundle_without_preprocessing_says_so(serve, digits):
    with Cascade.load(digits) as cascade, serve(cascade) as server, server.client() as client:
        done = client.post("/v1/predict", json={"instances": ["seven"]})
        assert done.status_code == 400
        assert "this bundle says nothing about raw rows" in done.json()["error"]
        tensor = {"name": "text", "datatype": "BYTES", "shape": [1], "data": ["seven"]}
        done = client.post(f"/v2/models/{cascade.manifest.name}/infer", json={"inputs": [tensor]})
        assert done.status_code == 400
        assert "this bundle says nothing about raw rows" in done.json()["error"]
