import re
from urllib.parse import urljoin

import httpx
import pytest
from offramp.runtime import Cascade, Online


@pytest.mark.parametrize("page", ["/", "/try", "/docs"])
def test_a_page_and_all_it_loads_come_from_this_server(client, page):
    pending, seen = [page], set()
    while pending:
        path = pending.pop()
        seen.add(path)
        reply = client.get(path)
        assert reply.status_code == 200, path
        assert reply.headers["content-security-policy"] == "default-src 'self'"
        text = reply.text.replace('xmlns="http://www.w3.org/2000/svg"', "")  # a name, which nobody fetches
        assert not re.search(r"(?:https?:)?//[a-z0-9-]+\.[a-z]", text), path
        if reply.headers["content-type"].startswith("text/html"):
            loaded = [urljoin(path, link) for link in re.findall(r'(?:src|href)="([^"]+)"', reply.text)]
            pending += [link for link in loaded if link.startswith("/static/") and link not in seen]
    assert len(seen) == 5, "a page, its icon, the look of all pages, its own style and its script"


def test_a_browser_that_asks_for_an_icon_by_itself_gets_the_same_one(client):
    icon = client.get("/favicon.ico")
    assert icon.status_code == 200
    assert icon.headers["content-type"].startswith("image/svg+xml")
    assert icon.content == client.get("/static/icon.svg").content


def test_the_live_page_reads_only_metrics_that_exist(rows_bundle, tmp_path, serve):
    pytest.importorskip("sqlalchemy")
    kept = Online(tmp_path / "kept.db")
    with Cascade.load(rows_bundle, threads=1, recalibration=kept) as cascade, serve(cascade) as server:
        exported, script = (httpx.get(f"{server.url}{path}").text for path in ("/metrics", "/static/live.js"))
    named = re.findall(r'"(offramp_\w+)"|\.(offramp_\w+)', script)
    names = {a or b for a, b in named}
    assert len(names) > 5
    for name in names:
        assert re.search(rf"^# TYPE {name} ", exported, re.MULTILINE), name


def test_static_serves_its_own_files_only(client):
    for path in ("/static/none.js", "/static/..%2fapp.py", "/static/%2e%2e/app.py", "/static/__init__.py"):
        assert client.get(path).status_code == 404


def test_the_openapi_document_has_every_route_and_its_examples_work(client, tokens_server):
    with tokens_server.client() as other:
        for asked in (client, other):
            document = asked.get("/openapi.json").json()
            assert {"/v1/predict", "/v2/models/{model}/infer", "/v2/health/live", "/metrics"} <= document[
                "paths"
            ].keys()
            model = asked.get("/v1/operating-points").json()["model"]
            posts = {path: operations["post"] for path, operations in document["paths"].items() if "post" in operations}
            assert len(posts) == 2
            for path, operation in posts.items():
                example = operation["requestBody"]["content"]["application/json"]["example"]
                reply = asked.post(path.replace("{model}", model), json=example)
                assert reply.status_code == 200, reply.text
                if path == "/v1/predict":
                    assert all(one["label"] >= 0 for one in reply.json()["predictions"])  # masks of zeros have none
                assert set(operation["responses"]) == {"200", "400", "404", "413", "429", "501", "503"}


def test_every_reference_in_the_openapi_document_leads_somewhere(client):
    text = client.get("/openapi.json").text
    schemas = client.get("/openapi.json").json()["components"]["schemas"]
    references = set(re.findall(r'"#/components/schemas/(\w+)"', text))
    assert references
    assert references <= schemas.keys()


def test_answers_have_the_documented_fields(client, x):
    schemas = client.get("/openapi.json").json()["components"]["schemas"]
    answer = client.post("/v1/predict", json={"instances": x[:2].tolist(), "probabilities": True}).json()
    assert answer.keys() == schemas["PredictResponse"]["properties"].keys()
    documented = schemas["Prediction"]["properties"].keys()
    assert answer["predictions"][0].keys() == documented - {"involuntary"}  # only there where it is true
    cut = client.post("/v1/predict", json={"instances": x.tolist(), "max_exit": 0}).json()["predictions"]
    assert {name for one in cut for name in one} == documented - {"probabilities"}
