"""Texts become the ids, mask and kinds the model was trained on, or one clear error."""

import json

import numpy as np
import pytest
from offramp.runtime import BundleError, InputError
from offramp.runtime.preprocess import Text, TextPreprocessor

tokenizers = pytest.importorskip("tokenizers")

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "what", "is", "my", "balance", "é", "吗"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A whitespace tokenizer whose own padding and truncation would be wrong here."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    made.enable_padding(length=64)
    made.enable_truncation(3)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return path


def opened(tokenizer, *, length=None, mixed=True, **fields):
    spec = Text(
        tokenizer="tokenizer.json", **{"ids": "ids", "mask": "mask", "type_ids": "kinds", "max_length": 8} | fields
    )
    dtypes = {"ids": np.int64, "mask": np.int32, "kinds": np.int64}
    return TextPreprocessor(spec, tokenizer, dtypes, length, mixed)


def test_a_batch_is_as_long_as_its_longest_text(tokenizer):
    made = opened(tokenizer, pad_type_id=7)(["what is my balance", "my"])
    assert made["ids"].tolist() == [[2, 4, 5, 6, 7, 3], [2, 6, 3, 0, 0, 0]]
    assert made["mask"].tolist() == [[1] * 6, [1, 1, 1, 0, 0, 0]]
    assert made["kinds"].tolist() == [[0] * 6, [0, 0, 0, 7, 7, 7]]
    assert (made["ids"].dtype, made["mask"].dtype) == (np.int64, np.int32)


@pytest.mark.parametrize(
    ("template", "special", "ids", "kinds"),
    [
        ("$A:0 [SEP]:0 [CLS]:2", True, [4, 3, 2], [0, 0, 2]),
        ("[CLS]:1 $A:1", True, [2, 4], [1, 1]),
        ("$A:0 [SEP]:0 [CLS]:2", False, [4], [0]),
    ],
)
def test_types_are_those_of_the_tokenizers_template(tmp_path, template, special, ids, kinds):
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(single=template, special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    made.save(str(tmp_path / "tokenizer.json"))
    one = opened(tmp_path / "tokenizer.json", special_tokens=special)
    assert one(["what"])["ids"].tolist() == [ids]
    assert one(["what"])["kinds"].tolist() == [kinds]
    both = one(["what", "what is"])
    assert both["kinds"][0, : len(kinds)].tolist() == kinds
    ((_, alone),) = one.parts(["what"])
    assert alone["kinds"].tolist() == [kinds]
    left = opened(tmp_path / "tokenizer.json", special_tokens=special, padding="left", pad_type_id=7, length=6)
    assert left(["what"])["kinds"].tolist() == [[7] * (6 - len(kinds)) + kinds]


def test_padding_may_be_on_the_left_and_the_length_fixed(tokenizer):
    assert opened(tokenizer, padding="left", pad_id=9)(["my", "is my"])["ids"].tolist() == [[9, 2, 6, 3], [2, 5, 6, 3]]
    assert opened(tokenizer, length=8)(["my"])["mask"].tolist() == [[1, 1, 1, 0, 0, 0, 0, 0]]


def test_longer_rows_lose_the_side_that_was_chosen_or_are_refused(tokenizer):
    text = ["what is my balance"]
    assert opened(tokenizer, max_length=4)(text)["ids"].tolist() == [[2, 4, 5, 3]]
    assert opened(tokenizer, max_length=4, truncation="left")(text)["ids"].tolist() == [[2, 6, 7, 3]]
    with pytest.raises(InputError, match="row 1 has 6 tokens, expected at most 4"):
        opened(tokenizer, max_length=4, truncation=None)(["my", *text])


def test_text_of_any_script_and_empty_text(tokenizer):
    made = opened(tokenizer)(["é 吗 \U0001f600", "", " \n"])
    assert made["ids"].tolist() == [[2, 8, 9, 1, 3], [2, 3, 0, 0, 0], [2, 3, 0, 0, 0]]


def test_a_text_without_any_token_is_one_pad_token_attended_to(tokenizer):
    made = opened(tokenizer, special_tokens=False)([""])
    assert (made["ids"].tolist(), made["mask"].tolist()) == ([[0]], [[1]])


def test_no_texts_are_no_rows(tokenizer):
    assert opened(tokenizer)([])["ids"].shape == (0, 1)


def test_parts_hold_rows_of_one_length_and_every_row_once(tokenizer):
    texts = ["my", "is my", "balance", "", "what is"]
    parts = opened(tokenizer, mixed=False).parts(texts)
    assert [inputs["ids"].shape for _, inputs in parts] == [(1, 2), (2, 3), (2, 4)]
    assert np.concatenate([rows for rows, _ in parts]).tolist() == [3, 0, 2, 1, 4]
    assert all(inputs["mask"].all() for _, inputs in parts)


def test_a_model_that_takes_no_padding_says_so(tokenizer):
    with pytest.raises(InputError, match="3 to 4 tokens, and this model can't take padded rows"):
        opened(tokenizer, mixed=False)(["my", "is my"])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("what", "expected a list of strings, got str"),
        (["a", None], "row 11 is missing"),
        (["a", 3], "row 11 is of type int"),
        (["a", "\ud83d"], "row 11 has half a surrogate pair"),
        (["a", "b" * 1_000_001], "row 11 has 1000001 characters"),
    ],
)
def test_what_is_no_text_is_refused_by_row(tokenizer, rows, message):
    with pytest.raises(InputError, match=message):
        opened(tokenizer)(rows, first=10)


def test_a_file_that_is_no_tokenizer_is_named(tokenizer, tmp_path):
    for content in ("", "{}", json.dumps({"model": {"type": "nothing"}})):
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(BundleError, match=r"tokenizer\.json: not a tokenizer\.json"):
            opened(tmp_path / "tokenizer.json")


def test_a_missing_library_names_the_extra(tokenizer, monkeypatch):
    import sys

    from offramp.runtime import RuntimeUnavailable

    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(RuntimeUnavailable, match=r'pip install "\.\[text\]"'):
        opened(tokenizer)


def test_real_texts_give_the_ids_the_model_was_trained_on(shared):
    texts = json.loads(shared("data/clinc150/text.json").read_text())["test"]
    spec = Text(tokenizer="t", ids="input_ids", mask="attention_mask", max_length=128)
    dtypes = {"input_ids": np.int64, "attention_mask": np.int64}
    path = shared("models/minilm_clinc150/tokenizer.json")
    with np.load(shared("data/clinc150/test.npz")) as archive:
        made = TextPreprocessor(spec, path, dtypes, None, True)(texts)
        assert (made["input_ids"] == archive["input_ids"]).all()
        assert (made["attention_mask"] == archive["attention_mask"]).all()
