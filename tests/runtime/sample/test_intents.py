"""The sentences that ship with offramp, asked of the bundle that ships with it, once more."""

from pathlib import Path

import numpy as np
import pytest
from offramp.runtime import Cascade, InputError, sample

pytest.importorskip("tokenizers")
EVERY = 5  # of the 1,000 sentences about other things


@pytest.fixture(scope="module")
def cascade(tmp_path_factory):
    with Cascade.load(sample.intents(tmp_path_factory.mktemp("sample") / "intents")) as cascade:
        yield cascade


@pytest.fixture(scope="module")
def answers(cascade):
    """By operating point: label, exit, abstention and FLOPs of held-out sentences and of those about other things."""
    known, others = sample.sentences()
    texts = [text for text, _ in known] + others[::EVERY]
    found = {}
    for name in cascade.operating_points:
        columns = {kind: np.zeros(len(texts), np.int64) for kind in ("label", "exit", "abstain", "flops")}
        for rows, inputs in cascade.preprocess_by_length(texts):
            out = cascade.at(name).predict(inputs)
            for kind, column in columns.items():
                column[rows] = getattr(out, kind)
        found[name] = columns
    return found


@pytest.fixture(scope="module")
def truth(cascade):
    return np.array([cascade.classes.index(intent) for _, intent in sample.sentences()[0]])


def test_it_is_as_accurate_as_it_says_and_saves_most_of_the_work(answers, truth):
    right = {name: (column["label"][: len(truth)] == truth).mean() for name, column in answers.items()}
    assert right["full"] > 0.95
    assert right["full"] - right["fast"] <= 0.005
    assert answers["fast"]["flops"].sum() < 0.3 * answers["full"]["flops"].sum()
    assert set(answers["fast"]["exit"]) == {0, 1, 2, 3}


def test_it_abstains_on_what_is_none_of_its_intents(answers, truth):
    for column in answers.values():
        known, others = column["abstain"][: len(truth)], column["abstain"][len(truth) :]
        assert known.mean() < 0.2
        assert others.mean() > 0.8
        wrong = column["label"][: len(truth)] != truth
        assert wrong[known == 0].mean() < 0.025


def test_a_tilde_is_ones_home_and_somebody_unknown_has_none(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert sample.intents("~/below/intents") == tmp_path / "below" / "intents"
    with pytest.raises(InputError, match="intents already exists"):
        sample.intents("~/below/intents")
    with pytest.raises(InputError, match=r"folder is '~nobody_here/intents', whose home isn't known"):
        sample.intents("~nobody_here/intents")


def test_any_word_can_be_spelt(cascade):
    unknown = cascade.preprocess(["[UNK]"])["input_ids"][0, 1]
    for text in ("floccinaucinihilipilification", "x-ray 99%", "what's up?", "QUEUE", "a" * 60):
        assert unknown not in cascade.preprocess([text])["input_ids"]


def test_it_is_small_enough_to_ship():
    folder = Path(sample.__file__).parent
    assert sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) < 16e6
    notice = (folder / "NOTICE.md").read_text(encoding="utf-8")
    for named in ("CLINC150", "CC BY 3.0", "all-MiniLM-L6-v2", "Apache License 2.0"):
        assert named in notice


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("point", ["full", "fast"])
def test_a_number_below_0_is_no_token(cascade, rows, point):
    inputs = cascade.preprocess(["what is my balance"] * rows)
    wrong = {name: array.copy() for name, array in inputs.items()}
    wrong["input_ids"][-1, 1] = -1
    with pytest.raises(InputError, match=f"'input_ids' has -1 in row {rows - 1}: expected 0 or more, as a tokeniser's"):
        cascade.at(point).predict(wrong)
    assert len(cascade.at(point).predict(inputs)) == rows
