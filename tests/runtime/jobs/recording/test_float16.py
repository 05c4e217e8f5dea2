"""float16 logits are stored only where who wins, and who comes before whom, survives."""

import numpy as np
import pytest
from offramp.runtime import metrics, scores
from offramp.runtime.jobs.recording.float16 import check_float16, moved_pairs, store_float16


def logits(rows=3000, classes=20, spread=4.0, seed=0):
    return (np.random.default_rng(seed).standard_normal((rows, classes)) * spread).astype(np.float32)


def test_moved_pairs_bounds_the_discordant_ones():
    random = np.random.default_rng(0)
    for noise in (0.0, 0.01, 0.1, 1.0):
        a = random.standard_normal(400)
        b = a + noise * random.standard_normal(400)
        i, j = np.triu_indices(400, 1)
        discordant = ((a[i] - a[j]) * (b[i] - b[j]) < 0).mean()
        assert discordant <= moved_pairs(a, b) <= 2 * discordant + 1e-12
    assert moved_pairs(np.arange(10.0), np.zeros(10)) == pytest.approx(100 / 90), "ties lose every order"
    assert moved_pairs(np.zeros(10), np.zeros(10)) == 0
    assert moved_pairs(np.array([np.nan, 1.0]), np.array([1.0, 2.0])) == 0


def test_ordinary_logits_survive_and_auroc_hardly_moves():
    z = logits()
    found = check_float16(z)
    assert found.survives
    wide = z.astype(np.float16).astype(np.float32)
    wrong = scores.top_label(z) != np.random.default_rng(1).integers(0, 3, len(z))
    moved = metrics.auroc_f(scores.log_odds(z), wrong) - metrics.auroc_f(scores.log_odds(wide), wrong)
    assert abs(moved) <= found.pairs * len(z) ** 2 / (2 * wrong.sum() * (~wrong).sum())


@pytest.mark.parametrize(
    ("z", "why"),
    [
        (logits(spread=30_000.0), "overflow"),
        (1000 + logits(spread=0.1), "labels"),
        (np.array([[600.0 + k * 1e-3, 0.0] for k in range(500)], np.float32), "pairs"),
    ],
)
def test_logits_whose_ranking_float16_would_lose_do_not(z, why):
    found = check_float16(z)
    assert not found.survives
    assert getattr(found, why) > (0 if why == "overflow" else 2e-3)


def test_storing_replaces_the_file_once(tmp_path):
    z, path = logits(), tmp_path / "logits_0.npy"
    np.save(path, z)
    store_float16(path)
    first = path.read_bytes()
    np.save(tmp_path / "plain.npy", z.astype(np.float16))
    assert first == (tmp_path / "plain.npy").read_bytes()
    store_float16(path)
    assert path.read_bytes() == first
    assert sorted(p.name for p in tmp_path.iterdir()) == ["logits_0.npy", "plain.npy"]
