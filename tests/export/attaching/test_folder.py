"""A checkpoint gets heads on disk: its classes, tokenizer and processor with them, its weights left where they are."""

import json

import numpy as np
import pytest
import torch
from classifiers import hugging_face, layers, library, rows
from offramp.export import attach_exits
from offramp.export.attaching.folder import load_attached, save_attached
from offramp.runtime import ExportError
from offramp.runtime.cli import main


def logits(attached, inputs):
    with torch.no_grad():
        return [exit_.numpy() for exit_ in attached(**inputs)]


@pytest.fixture
def checkpoint(tmp_path):
    """Of a text classifier, with a tokenizer of eight words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path / "checkpoint"
    hugging_face("Bert", id2label={0: "no", 1: "maybe", 2: "yes"}, num_hidden_layers=2).save_pretrained(folder)
    words = ["[PAD]", "[UNK]", "hello", "how", "are", "you", "fine", "thanks"]
    tokenizer = Tokenizer(models.WordLevel({word: k for k, word in enumerate(words)}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 20, "padding_side": "right"}))
    return folder


def test_a_checkpoint_brings_its_classes_and_its_tokenizer(checkpoint):
    about = attach_exits(checkpoint).about
    assert about.classes == ["no", "maybe", "yes"]
    assert about.preprocess["tokenizer"] == str(checkpoint / "tokenizer.json")
    assert (about.preprocess["max_length"], about.preprocess["pad_id"]) == (20, 0)


def test_the_command_writes_heads_that_load_as_they_were(checkpoint, tmp_path, capsys):
    assert main(["attach", str(checkpoint), "--out", str(tmp_path / "attached")]) == 0
    assert "bert.encoder.layer.0" in capsys.readouterr().out
    attached, index = load_attached(tmp_path / "attached")
    assert index.classes == ["no", "maybe", "yes"]
    example = attached.about.example_inputs
    again = attach_exits(checkpoint)
    for one, other in zip(logits(attached, example), logits(again, example), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_checkpoint_that_changed_since_is_refused(checkpoint, tmp_path):
    save_attached(attach_exits(checkpoint), tmp_path / "attached", str(checkpoint))
    (checkpoint / "config.json").write_text((checkpoint / "config.json").read_text().replace("maybe", "perhaps"))
    with pytest.raises(ExportError, match="changed since"):
        load_attached(tmp_path / "attached")


def test_a_model_of_the_users_own_is_built_by_his_function(tmp_path):
    save_attached(attach_exits(layers(), example_inputs=rows()), tmp_path / "attached", "model.py:build")
    asked = []
    attached, _ = load_attached(tmp_path / "attached", lambda source: asked.append(source) or layers())
    assert asked == ["model.py:build"]
    expected = logits(attach_exits(layers(), example_inputs=rows()), {"x": rows()})
    for one, other in zip(logits(attached, {"x": rows()}), expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_timm_checkpoint_brings_its_label_names_and_data_config(tmp_path):
    timm = library("timm")
    model = timm.create_model("resnet18", num_classes=2)
    folder = tmp_path / "checkpoint"
    timm.models.save_for_hf(model, folder, model_config={"label_names": ["cat", "dog"]}, safe_serialization=True)
    attached = attach_exits(folder)
    assert attached.about.classes == ["cat", "dog"]
    assert attached.about.preprocess["shorter"] == int(224 / 0.95)
    assert attached.about.title == "resnet18"


def test_a_processor_of_pictures_is_understood(tmp_path):
    folder = tmp_path / "checkpoint"
    hugging_face("ViT").save_pretrained(folder)
    processor = {"size": {"height": 32, "width": 32}, "image_mean": [0.5] * 3, "image_std": [0.25] * 3, "resample": 3}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    spec = attach_exits(folder).about.preprocess
    assert (spec["height"], spec["width"], spec["interpolation"]) == (32, 32, "bicubic")
    assert (spec["mean"], spec["std"]) == ([0.5] * 3, [0.25] * 3)


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "can't be read as JSON"),
        (lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"), "has no .safetensors"),
        (lambda folder: (folder / "config.json").write_text('{"architectures": ["Nothing"]}'), "'Nothing', which"),
    ],
)
def test_a_checkpoint_that_cant_be_read_is_one_line_and_exit_code_two(checkpoint, tmp_path, capsys, spoil, named):
    spoil(checkpoint)
    assert main(["attach", str(checkpoint), "--out", str(tmp_path / "attached")]) == 2
    said = capsys.readouterr().err.strip()
    assert named in said
    assert "\n" not in said
    assert not (tmp_path / "attached").exists()
