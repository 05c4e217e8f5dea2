"""Heads learn from labels or from the last exit alone, the same however often the training was killed."""

import json
import os
import shutil

import numpy as np
import pytest
import torch
from classifiers import hugging_face, layers, rows
from killing import killed_at
from offramp.export import attach_exits, train_heads
from offramp.export.attaching.folder import load_attached, save_attached
from offramp.export.training.fit import Recipe, paced, split
from offramp.runtime import InputError
from offramp.runtime.cli import main

QUICK = Recipe(epochs=12, steps=600)


@pytest.fixture(autouse=True)
def one_thread():
    """Threads don't outlive a fork, and add up in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def attached():
    return attach_exits(layers(), ["layers.0", "layers.2"], example_inputs={"x": rows()})


def weights(trained):
    return weights_of(trained.heads)


def check_same(one, other):
    assert one.keys() == other.keys()
    for name, array in one.items():
        np.testing.assert_array_equal(array, other[name], err_msg=name)


@pytest.fixture
def data(tmp_path):
    """Rows of the model's own answers, 600 of them."""
    x = rows(600, seed=1)
    with torch.no_grad():
        labels = layers()(x).argmax(1).numpy()
    np.savez(tmp_path / "train.npz", x=x.numpy(), labels=labels)
    np.savez(tmp_path / "bare.npz", x=x.numpy())
    return tmp_path / "train.npz"


def test_heads_learn_and_the_model_stays_as_it_is(data):
    model = attached()
    before = {name: tensor.clone() for name, tensor in model.source.state_dict().items()}
    trained = train_heads(model, data, recipe=QUICK)
    assert (trained.rows, trained.labelled, trained.held_out) == (600, 600, 60)
    most = max(np.bincount(np.load(data)["labels"])) / 600
    assert all(line.accuracy > most + 0.1 for line in trained.exits[:-1])
    assert trained.exits[-1].accuracy == 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.source.state_dict().items())
    assert not model.heads.training


def test_rows_without_labels_learn_what_the_last_exit_says(data):
    bare = train_heads(attached(), data.parent / "bare.npz", recipe=QUICK)
    ignoring = train_heads(attached(), data, labels=False, recipe=QUICK)
    check_same(weights(bare.attached), weights(ignoring.attached))
    assert bare.labelled == 0
    assert [line.accuracy for line in bare.exits] == [None] * 3
    assert bare.exits[0].agreement > 0.5


def test_rows_labelled_minus_one_are_taught_by_the_last_exit_alone(data):
    with np.load(data) as archive:
        np.savez(data.parent / "none.npz", x=archive["x"], labels=np.full(600, -1))
    unknown = train_heads(attached(), data.parent / "none.npz", recipe=QUICK)
    bare = train_heads(attached(), data.parent / "bare.npz", recipe=QUICK)
    check_same(weights(unknown.attached), weights(bare.attached))


def test_a_seed_decides_the_result(data):
    one, same = (weights(train_heads(attached(), data, recipe=QUICK).attached) for _ in range(2))
    check_same(one, same)
    other = weights(train_heads(attached(), data, recipe=Recipe(epochs=12, steps=600, seed=1)).attached)
    assert any(not np.array_equal(array, other[name]) for name, array in one.items())


@pytest.mark.parametrize("touch", [3, 12, 40, 90])
def test_a_training_that_was_killed_ends_as_if_it_hadnt_been(data, tmp_path, monkeypatch, touch):
    monkeypatch.setattr("offramp.export.training.fit._CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr("offramp.export.training.features._CHECKPOINT_SECONDS", 0.0)
    expected = weights(train_heads(attached(), data, recipe=QUICK).attached)
    work = tmp_path / "work"
    work.mkdir()
    assert killed_at(touch, lambda: train_heads(attached(), data, recipe=QUICK, work=work))
    check_same(weights(train_heads(attached(), data, recipe=QUICK, work=work).attached), expected)


JOINT = Recipe(epochs=10, steps=300, passes=10, joint_rate=3e-3)


def noisy(folder, **more):
    """Rows whose labels the model often misses, so that there is something to learn."""
    x = rows(600, seed=1)
    with torch.no_grad():
        labels = layers()(x.flip(1)).argmax(1).numpy()
    np.savez(folder / "noisy.npz", x=x.numpy(), **({"labels": labels} | more))
    return folder / "noisy.npz"


def test_joint_training_trains_a_copy_of_the_model_with_the_heads(tmp_path):
    frozen = train_heads(attached(), noisy(tmp_path), recipe=JOINT)
    model = attached()
    given = model.source
    trained = train_heads(model, noisy(tmp_path), recipe=JOINT, joint=True)
    assert trained.before == frozen.exits[-1].accuracy
    means = [np.mean([line.accuracy for line in one.exits]) for one in (frozen, trained)]
    assert means[0] + 0.03 < means[1]
    check_same(weights_of(given), weights_of(layers()))
    assert all(not np.array_equal(a, weights_of(given)[name]) for name, a in weights_of(model.source).items())
    with torch.no_grad():
        said = model(x=rows(600, seed=1))[-1].argmax(1).numpy()
    held = split(600, JOINT)[1]
    truth = np.load(tmp_path / "noisy.npz")["labels"]
    assert (said == truth)[held].mean() == pytest.approx(trained.exits[-1].accuracy)


def test_joint_training_without_labels_keeps_the_last_exit_where_it_was(data):
    trained = train_heads(attached(), data, recipe=JOINT, joint=True, labels=False)
    assert [line.accuracy for line in trained.exits] == [None] * 3
    with torch.no_grad():
        x = rows(300, seed=5)
        assert (trained.attached(x=x)[-1].argmax(1) == layers()(x).argmax(1)).float().mean() > 0.95


def test_joint_training_that_makes_nothing_better_leaves_the_weights_as_they_were(data):
    wild = Recipe(epochs=10, steps=300, passes=1, joint_rate=10.0)
    trained = train_heads(attached(), data, recipe=wild, joint=True)
    check_same(weights_of(trained.attached.source), weights_of(layers()))


@pytest.mark.parametrize("touch", [60, 100, 140, 180])
def test_joint_training_that_was_killed_ends_as_if_it_hadnt_been(tmp_path, monkeypatch, touch):
    monkeypatch.setattr("offramp.export.training.joint._CHECKPOINT_SECONDS", 0.0)
    recipe = Recipe(epochs=4, steps=100, passes=1, joint_rate=1e-3)
    expected = train_heads(attached(), noisy(tmp_path), recipe=recipe, joint=True)
    work = tmp_path / "work"
    work.mkdir()
    assert killed_at(
        touch, lambda: train_heads(attached(), tmp_path / "noisy.npz", recipe=recipe, joint=True, work=work)
    )
    again = train_heads(attached(), tmp_path / "noisy.npz", recipe=recipe, joint=True, work=work)
    check_same(weights_of(again.attached), weights_of(expected.attached))
    assert again.exits == expected.exits


def test_labels_that_are_not_wanted_may_be_anything(data, tmp_path):
    with np.load(data) as known:
        np.savez(tmp_path / "odd.npz", x=known["x"], labels=np.full(len(known["x"]), 99))
    trained = train_heads(attached(), tmp_path / "odd.npz", labels=False, recipe=QUICK)
    assert (trained.labelled, trained.notes) == (0, ())


def test_labels_that_are_missing_or_all_alike_are_said_to_be(data, tmp_path):
    with np.load(data) as known:
        np.savez(tmp_path / "none.npz", x=known["x"], intent=np.zeros(len(known["x"])))
        np.savez(tmp_path / "one.npz", x=known["x"], labels=np.zeros(len(known["x"]), int))
    (said,) = train_heads(attached(), tmp_path / "none.npz", recipe=QUICK).notes
    assert "has no labels (a column 'labels' or 'label'): heads learned to say what the last exit says" in said
    (said,) = train_heads(attached(), tmp_path / "one.npz", recipe=QUICK).notes
    assert "are of one class: the heads know no other" in said
    assert train_heads(attached(), data, recipe=QUICK).notes == ()


def test_joint_training_refuses_weights_that_are_too_coarse(data):
    model = attach_exits(Coarse().eval(), ["inner.layers.0"], example_inputs={"x": rows()})
    with pytest.raises(InputError, match=r"needs weights in float32, inner.layers.0.weight is bfloat16"):
        train_heads(model, data, recipe=QUICK, joint=True)


class Coarse(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = layers().bfloat16()

    def forward(self, x):
        return self.inner(x.bfloat16()).float()


def test_rows_of_several_shapes_come_back_as_they_were(tmp_path):
    from offramp.export.training.inputs import keep_inputs
    from offramp.export.training.rows import open_rows

    model = attach_exits(hugging_face("Bert"), preprocess=words(tmp_path))
    texts = [" ".join(["a", "b", "c"][: 1 + k % 3]) for k in range(700)]
    (tmp_path / "texts.txt").write_text("\n".join(texts))
    inputs = keep_inputs(open_rows(model, tmp_path / "texts.txt"), tmp_path)
    batches = inputs.batches(np.arange(700)[::-1], 64)
    assert sorted(np.concatenate(batches)) == list(range(700))
    assert max(map(len, batches)) == 64
    for some in batches:
        found = inputs.of(some)
        assert found["input_ids"].tolist() == [[1, 2, 3][: 1 + k % 3] for k in some]
        assert found["attention_mask"].all()


def words(folder):
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"[PAD]": 0, "a": 1, "b": 2, "c": 3}, "[PAD]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return {"kind": "text", "tokenizer": str(folder / "tokenizer.json"), "max_length": 8, "pad_id": 0, "sample": ["a"]}


def weights_of(module):
    return {name: tensor.numpy().copy() for name, tensor in module.state_dict().items()}


def test_the_command_trains_what_attach_wrote(data, tmp_path, capsys):
    (tmp_path / "model.py").write_text("from classifiers import layers as build\n")
    save_attached(attached(), tmp_path / "attached", f"{tmp_path}/model.py:build")
    arguments = [str(tmp_path / "attached"), str(data), "--out", str(tmp_path / "trained"), "--epochs", "10"]
    assert main(["train", *arguments]) == 0
    assert "as the last" in capsys.readouterr().out
    loaded, index = load_attached(tmp_path / "trained", lambda _: layers())
    assert index.trained["rows"] == 600
    recipe = Recipe(epochs=10)
    check_same(weights(loaded), weights(train_heads(attached(), data, recipe=recipe).attached))
    assert os.listdir(tmp_path).count(".trained.unfinished") == 0


def test_the_command_keeps_weights_that_were_trained_jointly(tmp_path, capsys):
    (tmp_path / "model.py").write_text("from classifiers import layers as build\n")
    save_attached(attached(), tmp_path / "attached", f"{tmp_path}/model.py:build")
    data = str(noisy(tmp_path))
    joint = train_heads(attached(), data, recipe=JOINT, joint=True).attached
    save_attached(joint, tmp_path / "joint", f"{tmp_path}/model.py:build", tuned=True)
    for given, out, options in (("attached", "one", ["--joint"]), ("joint", "two", [])):
        paths = [str(tmp_path / given), data, "--out", str(tmp_path / out), "--epochs", "10"]
        assert main(["train", *paths, *options]) == 0
    assert "before joint training, the last exit: " in capsys.readouterr().out
    assert load_attached(tmp_path / "one", lambda _: layers())[1].tuned
    again, _ = load_attached(tmp_path / "two", lambda _: layers())
    check_same(weights_of(again.source), weights_of(joint.source))


def test_rows_held_out_are_no_training_rows():
    train, held = split(100, Recipe(held_out=0.2))
    assert len(held) == 20
    assert sorted([*train, *held]) == list(range(100))


def test_the_learning_rate_rises_and_falls_to_nothing():
    shares = [paced(k / 100) for k in range(101)]
    assert max(shares) > 0.9
    assert shares[0] < 0.02
    assert shares[-1] < 1e-6


@pytest.mark.parametrize(
    ("arrays", "named"),
    [
        ({"y": np.zeros((20, 8), np.float32)}, "lacks the column 'x'"),
        ({"x": np.zeros((20, 7), np.float32)}, "the model fails"),
        ({"x": np.zeros((0, 8), np.float32)}, "has no rows"),
        ({"x": np.zeros((5, 8), np.float32)}, "5 rows, expected at least 10"),
        ({"x": np.zeros((20, 8), np.float32), "labels": np.full(20, 4)}, r"labels\[0\] is 4"),
    ],
)
def test_data_that_dont_fit_are_refused(tmp_path, arrays, named):
    np.savez(tmp_path / "train.npz", **arrays)
    with pytest.raises(InputError, match=named):
        train_heads(attached(), tmp_path / "train.npz", recipe=QUICK)


@pytest.mark.parametrize(("field", "value"), [("held_out", 0.9), ("rate", 0), ("teaching", 2), ("epochs", 0)])
def test_a_recipe_that_cant_be_is_refused(field, value):
    with pytest.raises(InputError, match=field):
        Recipe(**{field: value})


def test_an_index_that_is_no_index_is_refused(tmp_path, data, capsys):
    save_attached(attached(), tmp_path / "attached", "model.py:build")
    document = json.loads((tmp_path / "attached" / "attached.json").read_text())
    (tmp_path / "attached" / "attached.json").write_text(json.dumps({**document, "schema": "offramp-attached/9"}))
    assert main(["train", str(tmp_path / "attached"), str(data), "--out", str(tmp_path / "trained")]) == 2
    assert "schema is 'offramp-attached/9'" in capsys.readouterr().err
    (tmp_path / "attached" / "attached.json").unlink()
    assert main(["train", str(tmp_path / "attached"), str(data), "--out", str(tmp_path / "trained")]) == 2
    assert "written by `offramp attach`" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "attached")
    assert main(["train", str(tmp_path / "attached"), str(data), "--out", str(tmp_path / "trained")]) == 2
    assert "attached: no such folder" in capsys.readouterr().err
