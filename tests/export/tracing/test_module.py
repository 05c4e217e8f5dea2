"""The user's module stays as it was, whatever an export does with it, and what would make its export wrong is named."""

import random

import numpy as np
import pytest
import torch
from offramp.export import export_bundle
from offramp.export.tracing.module import Runner
from offramp.runtime import Cascade, ExportError
from torch.nn import functional
from toys import Plain, make


def photograph(model):
    """All that an export must leave alone, in bytes where it has some."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        "values": {n: t.detach().reshape(-1).contiguous().view(torch.uint8).tolist() for n, t in tensors.items()},
        "tensors": {n: id(t) for n, t in tensors.items()},
        "gradients": {n: t.requires_grad for n, t in tensors.items()},
        "modes": {n: m.training for n, m in model.named_modules()},
        "attributes": {n: sorted(m.__dict__) for n, m in model.named_modules()},
        "random": (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()),  # noqa: NPY002
    }


class Counting(Plain):
    """Counts its calls, keeps what it saw, and draws numbers that it doesn't use."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.full((8,), float("nan")), persistent=False)
        self.seen = []
        self.extra = torch.zeros(8)
        self.heads[0].requires_grad_(False)

    def forward(self, x):
        if not torch.compiler.is_compiling():
            self.calls += 1
            self.mean.copy_(x.mean(0))
            self.extra.add_(1)
            self.seen.append(x)
            self.last = x
            torch.rand(1), random.random(), np.random.rand()  # noqa: NPY002
        return super().forward(x)


class Failing(Counting):
    """Fails once the export is under way."""

    def forward(self, x):
        if len(x) == 1:
            raise RuntimeError("not a single row")
        return super().forward(x)


class Deciding(Counting):
    def forward(self, x):
        logits = super().forward(x)
        return logits[:1] if logits[0].max() > 1e9 else logits


class Swapping(Counting):
    """Puts other weights in the place of its own."""

    def forward(self, x):
        self.heads[2] = torch.nn.Linear(8, 4)
        self.eval()
        return super().forward(x)


@pytest.mark.parametrize("kind", [Plain, Counting, Failing, Deciding, Swapping])
def test_a_module_is_left_as_it_was(tmp_path, kind):
    model = make(kind)
    before = photograph(model)
    try:
        export_bundle(model, {"x": torch.randn(3, 8, generator=torch.Generator().manual_seed(0))}, tmp_path / "b")
    except ExportError:
        assert kind is not Plain
    after = photograph(model)
    for what, values in before.items():
        assert after[what] == values, what
    if kind is not Plain:
        assert model.seen == []
        assert model.extra.tolist() == [0] * 8


def test_examples_are_left_as_they_were(tmp_path):
    class Halving(Plain):
        def forward(self, x):
            return super().forward(x.mul_(0.5))

    x = torch.randn(4, 8)
    for example in (x, {"x": x.numpy()}, (x,)):
        before = x.clone()
        export_bundle(make(Halving), example, tmp_path / "b", overwrite=True)
        assert torch.equal(x, before)


CHANGES = {
    "arithmetic": lambda x: x.mul_(0.5).add_(1),
    "an operator": lambda x: x.__iadd__(1.0),
    "an index": lambda x: x.__setitem__((slice(None), 0), 0.25) or x,
    "an out argument": lambda x: torch.tanh(x, out=x),
    "a view": lambda x: x.view(-1).clamp_(-0.5, 0.5).view(x.shape),
    "relu": lambda x: functional.relu(x, inplace=True),
    "after its use": lambda x: (x * 2, x.zero_())[0],
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_forward_that_changes_its_input_in_place_answers_as_it_does(tmp_path, kind):
    class Changing(Plain):
        def forward(self, x):
            return super().forward(CHANGES[kind](x))

    model = make(Changing)
    bundle = export_bundle(model, {"x": torch.randn(3, 8)}, tmp_path / "b")
    x = torch.randn(5, 8)
    with torch.no_grad(), Cascade.load(bundle, threads=1) as cascade:
        records = cascade.record({"x": x.numpy()})
        np.testing.assert_allclose(np.stack(records.logits), np.stack(model(x.clone())), atol=1e-5)
        assert cascade.manifest.rows_independent


def test_a_forward_that_returns_one_tensor_again_and_again_is_not_random(tmp_path):
    class Reusing(Plain):
        def forward(self, x):
            logits = super().forward(x)
            if torch.compiler.is_compiling():
                return logits
            self.out = getattr(self, "out", {})
            kept = self.out.setdefault(tuple(x.shape), [torch.zeros_like(z) for z in logits])
            return [a.copy_(b) for a, b in zip(kept, logits, strict=True)]

    export_bundle(make(Reusing), {"x": torch.randn(3, 8)}, tmp_path / "b")


class Functional(Plain):
    def forward(self, x):
        return super().forward(functional.dropout(x, 0.1, training=self.training))


class ByMethod(Plain):
    def mode(self):
        return self.training

    def forward(self, x):
        return super().forward(x * (0.5 if self.mode() else 1.0))


class ByName(Plain):
    def forward(self, x):
        return super().forward(x * (0.5 if getattr(self, "training") else 1.0))  # noqa: B009


def halved_in_training(module, x):
    return x * 0.5 if module.training else x


class ByHelper(Plain):
    def forward(self, x):
        return super().forward(halved_in_training(self, x))


def inside(part, of=Plain):
    """A model that is in evaluation mode, all but the part deep inside it."""
    model = make(of).eval()
    model.blocks[1].append(part.train())
    return model


TRAINING = {
    "dropout": lambda: inside(torch.nn.Dropout(0.1)),
    "alpha dropout": lambda: inside(torch.nn.AlphaDropout(0.1)),
    "batch norm": lambda: inside(torch.nn.BatchNorm1d(8)),
    "batch norm that keeps no statistics": lambda: inside(torch.nn.BatchNorm1d(8, track_running_stats=False)),
    "random slopes": lambda: inside(torch.nn.RReLU()),
    "encoder layer": lambda: inside(torch.nn.TransformerEncoderLayer(8, 2, 8)),
    "compiled": lambda: inside(torch.jit.script(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.1)))),
    "functional": lambda: make(Functional).train(),
    "a method": lambda: make(ByMethod).train(),
    "a name": lambda: make(ByName).train(),
    "a helper": lambda: make(ByHelper).train(),
}


@pytest.mark.parametrize("kind", TRAINING)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_part_in_training_mode_is_named_before_anything_is_run(tmp_path, kind):
    model = TRAINING[kind]()
    ran = []
    model.register_forward_hook(lambda *_: ran.append(1))
    before = photograph(model)
    with pytest.raises(ExportError, match=r"\(\w+\) is in training mode\. Call model\.eval\(\) before exporting it"):
        export_bundle(model, {"x": torch.ones(3, 8)}, tmp_path / "b")
    assert not ran
    assert photograph(model) == before
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("part", [torch.nn.Linear(8, 8), torch.nn.Dropout(0.0), torch.nn.LayerNorm(8), torch.nn.GELU()])
def test_a_part_that_is_the_same_in_training_needs_no_other_mode(tmp_path, part):
    model = inside(part)
    export_bundle(model, {"x": torch.randn(3, 8)}, tmp_path / "b")
    assert part.training


class Early(Plain):
    """Leaves by itself where `sure` says so."""

    def __init__(self, sure):
        super().__init__()
        self.sure = sure

    def forward(self, x):
        logits = []
        for block, head in zip(self.blocks, self.heads, strict=True):
            x = x + block(x)
            logits.append(head(x))
            if self.sure(logits[-1]):
                return logits
        return logits


class EarlyAlone(Early):
    def forward(self, x):
        return super().forward(x)[-1]


class Looping(Plain):
    def forward(self, x):
        while x.abs().max() > 1e6:
            x = x / 2
        return super().forward(x)


def sure(z):
    return z.softmax(-1).max() > 0.9


DECIDING = {
    "one value": lambda z: z.softmax(-1).max() > 1e-3,
    "never": lambda z: z.max() > 1e9,
    "all rows": lambda z: (z.softmax(-1).amax(-1) > 0.9).all(),
    "item": lambda z: z.max().item() > 0.9,
    "float": lambda z: float(z.std()) > 9,
    "int": lambda z: int(z.argmax()) == 99,
    "a list": lambda z: max(z[0].tolist()) > 9,
    "numpy": lambda z: np.max(z.detach().numpy()) > 9,
    "numpy's function": lambda z: np.asarray(z.detach()).max() > 9,
    "how many": lambda z: len((z.amax(-1) < 9).nonzero()) == 0,
    "a function of the user's": lambda z: sure(z),
}


@pytest.mark.parametrize("kind", DECIDING)
@pytest.mark.parametrize("model", [Early, EarlyAlone])
def test_a_forward_that_leaves_by_itself_is_told_to_return_all_logits(tmp_path, capfd, kind, model):
    with pytest.raises(ExportError, match=r"forward decides by the values of a tensor") as raised:
        export_bundle(make(model, DECIDING[kind]), {"x": torch.randn(3, 8)}, tmp_path / "b")
    assert "Return the logits of all exits for every input, and offramp decides" in str(raised.value)
    assert "test_module.py line" in str(raised.value)
    assert "\n" not in str(raised.value)
    assert capfd.readouterr() == ("", ""), "torch prints graphs of thousands of lines"
    assert not (tmp_path / "b").exists()


def test_a_loop_by_values_is_named_with_its_line(tmp_path):
    with pytest.raises(ExportError, match=r"test_module\.py line \d+, `while x\.abs\(\)\.max\(\) > 1e6:`"):
        export_bundle(make(Looping), {"x": torch.randn(3, 8)}, tmp_path / "b")


def test_exits_that_come_and_go_are_named(tmp_path):
    class Hiding(Plain):
        def forward(self, x):
            logits = super().forward(x)
            few = not torch.compiler.is_compiling() and bool(x.abs().max() > 3)
            return logits[:1] if few else logits

    with pytest.raises(ExportError, match=r"forward returns 3 exits for some inputs and 1 for others. Return the log"):
        export_bundle(make(Hiding), {"x": torch.linspace(-1, 1, 24).view(3, 8)}, tmp_path / "b")


def test_exits_that_are_stacked_behind_the_batch_are_not_taken_for_rows(tmp_path):
    class Behind(Plain):
        def forward(self, x):
            return torch.stack(super().forward(x), 1)

    with pytest.raises(ExportError, match=r"stacked along axis 0, \[exits, batch, classes\]"):
        export_bundle(make(Behind), {"x": torch.randn(4, 8)}, tmp_path / "b")


CHANGED = 5.0


def test_what_changes_large_weights_is_undone_at_the_end_and_where_torch_counts_it_after_every_run():
    class Large(Plain):
        def __init__(self, unseen):
            super().__init__()
            self.register_buffer("large", torch.zeros(600, 600))
            self.unseen = unseen

        def forward(self, x):
            (self.large.data if self.unseen else self.large).fill_(CHANGED)
            return super().forward(x)

    for unseen in (True, False):
        model = Large(unseen)
        with Runner(model) as run:
            run({"x": np.zeros((3, 8), np.float32)})
            assert float(model.large[0, 0]) == (CHANGED if unseen else 0)
        assert float(model.large.abs().max()) == 0


def test_a_model_that_is_random_in_evaluation_is_told_why(tmp_path):
    class Dropping(Plain):
        def forward(self, x):
            return super().forward(functional.dropout(x))

    with pytest.raises(ExportError, match=r"random.*model\.eval\(\).*training=self\.training"):
        export_bundle(make(Dropping), {"x": torch.randn(4, 8)}, tmp_path / "b")
