"""Small bundles that take raw rows: texts by a tokenizer of ten words, pictures of 4 x 6 pixels."""

from pathlib import Path

import numpy as np
import torch
from offramp.export import export_bundle
from offramp.runtime.preprocess import Image
from torch import nn
from toys import SEQUENCE, Masked

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "what", "is", "my", "balance", "play", "music"]
NAMES = ["bank", "music", "other", "oos", "none"]


class Seen(nn.Module):
    """Two exits over small pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(3 * 4 * 6, 3) for _ in range(2))

    def forward(self, x):
        flat = x.flatten(1)
        return [head(torch.tanh(flat * (j + 1))) for j, head in enumerate(self.heads)]


def word_tokenizer(path: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    made.save(str(path))
    return path


def text_bundle(folder: Path, tokenizer: Path) -> Path:
    torch.manual_seed(0)
    ids = torch.randint(1, 10, (3, 6))
    spec = {"kind": "text", "tokenizer": str(tokenizer), "ids": "ids", "mask": "mask", "max_length": 8}
    return export_bundle(
        Masked().eval(),
        {"ids": ids, "mask": torch.ones_like(ids)},
        folder,
        dynamic_axes=SEQUENCE,
        classes=NAMES,
        preprocess=spec | {"sample": ["what is my balance", ""]},
    )


def picture_bundle(folder: Path) -> Path:
    """In folder/b, with a picture to try."""
    import PIL.Image

    torch.manual_seed(0)
    PIL.Image.fromarray(np.full((5, 5, 3), 9, np.uint8)).save(folder / "try.PNG")
    spec = Image(input="x", height=4, width=6, mean=[0.5] * 3, std=[0.25] * 3, sample=str(folder / "try.PNG"))
    example = {"x": torch.rand(2, 3, 4, 6)}
    return export_bundle(Seen().eval(), example, folder / "b", classes=["cat", "dog", "owl"], preprocess=spec)
