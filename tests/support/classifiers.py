"""Small trained-looking classifiers of one exit, as people have them; random weights, nothing is fetched."""

import importlib
from typing import Any

import pytest
import torch


def library(name: str) -> Any:
    """A library of models, or a skip with the reason; torchvision and what needs it may be built for another torch."""
    try:
        found = importlib.import_module(name)
        getattr(found, "BertModel", None)  # transformers imports what it is asked for
        return found
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"{name} can't be imported here: {error}")


SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 100,
    "num_labels": 3,
}
PATCHES = {name: size for name, size in SMALL.items() if name != "vocab_size"} | {"image_size": 32, "patch_size": 8}
HUGGING_FACE = {
    "Bert": SMALL,
    "Roberta": SMALL | {"max_position_embeddings": 40, "pad_token_id": 1},
    "DistilBert": {"dim": 32, "n_layers": 4, "n_heads": 2, "hidden_dim": 64, "vocab_size": 100, "num_labels": 3},
    "Albert": SMALL | {"embedding_size": 16},
    "Electra": SMALL | {"embedding_size": 16},
    "DebertaV2": SMALL
    | {
        "relative_attention": True,
        "pos_att_type": ["p2c", "c2p"],
        "position_buckets": 8,
        "share_att_key": True,
        "norm_rel_ebd": "layer_norm",
        "type_vocab_size": 0,
        "pooler_hidden_size": 32,
        "position_biased_input": False,
    },
    "ModernBert": SMALL
    | {name: k for k, name in enumerate(("pad_token_id", "bos_token_id", "eos_token_id", "sep_token_id"))}
    | {"cls_token_id": 1, "local_attention": 4},
    "ViT": PATCHES,
    "DeiT": PATCHES,
    "Swin": {
        "image_size": 32,
        "patch_size": 2,
        "embed_dim": 8,
        "depths": [1, 2, 1],
        "num_heads": [1, 2, 2],
        "window_size": 4,
        "num_labels": 3,
    },
    "ConvNext": {"image_size": 32, "hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 2, 1], "num_labels": 3},
}
_PICTURES = {"ViT", "DeiT", "Swin", "ConvNext"}


def hugging_face(family: str, **settings: Any) -> torch.nn.Module:
    """A classifier of this family, in evaluation mode."""
    transformers = library("transformers")
    task = "ForImageClassification" if family in _PICTURES else "ForSequenceClassification"
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**HUGGING_FACE[family], **settings})
    model: torch.nn.Module = getattr(transformers, f"{family}{task}")(config)
    return model.eval()


class Layers(torch.nn.Module):
    """Three layers and a classifier of four classes, on vectors of eight numbers."""

    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))
        self.classifier = torch.nn.Linear(8, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.classifier(x)


def layers(classes: int = 4) -> Layers:
    torch.manual_seed(0)
    model = Layers(classes).eval()
    for part in (*model.layers, model.classifier):  # as trained: every class is somebody's
        torch.nn.init.orthogonal_(part.weight, gain=2**0.5)
        torch.nn.init.zeros_(part.bias)
    return model


def rows(count: int = 6, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))
