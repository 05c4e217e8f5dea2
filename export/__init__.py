"""offramp.export: a trained multi-exit torch model, or a multi-output ONNX file, becomes a bundle.

A classifier with one exit gets more by `attach_exits`, and `train_heads` trains them.
"""

import importlib
from typing import TYPE_CHECKING, Any

from offramp.export.exporter import export_bundle
from offramp.export.outputs import MultiExitOutput

if TYPE_CHECKING:
    from offramp.export.attaching.attach import attach_exits
    from offramp.export.training.train import train_heads

__all__ = ["MultiExitOutput", "attach_exits", "export_bundle", "train_heads"]

# They import torch, which an ONNX file's export doesn't need.
_LATER = {"attach_exits": "offramp.export.attaching.attach", "train_heads": "offramp.export.training.train"}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LATER[name]), name)
