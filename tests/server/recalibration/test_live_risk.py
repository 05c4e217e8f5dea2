"""The live page shows the risk that labels show beside what was promised, in a real browser."""

import numpy as np
import pytest
from asking import predict
from pages import BROWSER, Page, dumped_by_browser

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
HEAD = ("point", "labelled rows", "coverage")


@pytest.fixture
def shown(tmp_path):
    """The live page of a server, once it has drawn what the server's metrics say."""

    def shown(server):
        return Page(dumped_by_browser(f"{server.url}/", tmp_path / "profile", 5))

    return shown


def section(page):
    """The attributes of the section about risk."""
    (found,) = [attrs for tag, attrs in page.tags if tag == "section" and attrs.get("id") == "risk"]
    return found


def test_there_is_none_where_nothing_is_kept(rows_server, shown):
    assert "hidden" in section(shown(rows_server))


def test_what_labels_show_stands_beside_what_was_promised(learns, shown):
    rng = np.random.default_rng(0)
    with learns() as (server, cascade), server.client() as client:
        assert not shown(server).table(*HEAD)
        answer = predict(client, rng.normal(size=(60, 8)).astype(np.float32))
        wrong = [k % 4 == 0 for k in range(60)]
        labels = [
            {"request_id": answer["request_id"], "index": k, "label": int((row["label"] + off) % 5)}
            for k, (row, off) in enumerate(zip(answer["predictions"], wrong, strict=True))
        ]
        assert client.post("/v1/feedback", json={"labels": labels}).status_code == 200
        cascade.recalibration.flush()
        server.app.state.follower.look(measure=True)
        figures = client.get("/v1/recalibration").json()["figures"]["balanced"]
        page = shown(server)
    assert "hidden" not in section(page)
    (line,) = page.table(*HEAD)
    assert (line["point"], line["labelled rows"]) == ("balanced", "60")
    for column, figure in (("coverage", "coverage"), ("risk", "selective_risk"), ("at most", "selective_risk_bound")):
        assert float(line[column].rstrip("%")) == pytest.approx(100 * figures[figure], abs=0.051)
    assert 0.1 < figures["selective_risk"] < 0.4
