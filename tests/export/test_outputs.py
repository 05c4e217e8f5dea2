"""What a model may return: exits in whatever form people write them, and what else it gives left out."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from offramp.export import MultiExitOutput
from offramp.export.outputs import flatten
from offramp.runtime import ExportError

A, B, C = (torch.full((5, 4), float(k)) for k in range(3))
HIDDEN = torch.zeros(5, 7, 4)


@dataclass
class Output:
    logits: Any
    loss: Any = None
    hidden_states: Any = None


class ModelOutput(OrderedDict):
    """As transformers has it: fields that are None aren't there."""


@pytest.mark.parametrize(
    "output",
    [
        [A, B, C],
        (A, B, C),
        torch.stack([A, B, C]),
        {"logits": [A, B, C]},
        {"logits": torch.stack([A, B, C])},
        {"logits": {"exit_0": A, "exit_1": B, "exit_2": C}},
        {"exit_0": A, "exit_1": B, "exit_2": C},
        {"exit_2": C, "exit_0": A, "exit_1": B},
        {"early": A, "middle": B, "late": C},
        {"logits": (A, B, C), "loss": None, "hidden_states": (HIDDEN, HIDDEN), "past_key_values": object()},
        ModelOutput(logits=(A, B, C), hidden_states=(HIDDEN,)),
        Output((A, B, C), hidden_states=(HIDDEN,)),
        MultiExitOutput([A, B, C]),
        namedtuple("Exits", "early middle late")(A, B, C),
        namedtuple("Model", "logits state")([A, B, C], HIDDEN),
        ([A, B, C], HIDDEN),
        ([A, B, C], {"attention": HIDDEN}),
        (torch.stack([A, B, C]), [HIDDEN]),
        (A, B, C, HIDDEN),
        (A, B, C, (HIDDEN, HIDDEN), None),
    ],
)
def test_exits_are_found_in_every_form_and_what_is_none_is_left_out(output):
    flat = flatten(output)
    assert list(flat) == ["logits"]
    assert [float(z[0, 0]) for z in flat["logits"]] == [0, 1, 2]
    assert all(z.shape == (5, 4) for z in flat["logits"])


def test_more_than_nine_exits_are_in_the_order_of_their_numbers():
    exits = {f"exit{k}": torch.full((5, 4), float(k)) for k in sorted(range(12), key=str)}
    assert [int(z[0, 0]) for z in flatten(exits)["logits"]] == list(range(12))


def test_stacked_kinds_are_taken_apart():
    flat = flatten(
        {
            "logits": torch.stack([A, B, C]),
            "routing": torch.zeros(6, 5),
            "features": torch.zeros(3, 5, 8),
            "external": torch.zeros(3, 5),
        }
    )
    assert {kind: [tuple(t.shape) for t in tensors] for kind, tensors in flat.items()} == {
        "logits": [(5, 4)] * 3,
        "routing": [(5,)] * 6,
        "features": [(5, 8)] * 3,
        "external": [(5,)] * 3,
    }


def test_one_exits_features_are_no_stack():
    assert [t.shape for t in flatten({"logits": A, "features": HIDDEN})["features"]] == [HIDDEN.shape]


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ({"logits": C, "exit_logits": [A, B]}, "returns 'exit_logits' beside its logits, of the same shape"),
        ((C, [A, B]), "returns logits behind others of the same shape"),
        ((C, {"aux": A}), "returns logits behind others of the same shape"),
        ({"logits": C, "early": {"a": A}}, "returns 'early' beside its logits, of the same shape"),
        ([{"boxes": A, "labels": A, "scores": A}], "as detection models do"),
        ({"pred_boxes": HIDDEN, "logits": HIDDEN}, "as detection models do"),
        (
            {"last_hidden_state": HIDDEN, "pooler_output": A},
            r"returns the keys \['last_hidden_state', 'pooler_output'\]",
        ),
        ("abc", r"logits\[0\] is a str"),
        (3, "the model returns a int"),
        ([], "the model has no exits"),
    ],
)
def test_what_may_be_meant_otherwise_is_refused_by_name(output, message):
    with pytest.raises(ExportError, match=message):
        flatten(output)
