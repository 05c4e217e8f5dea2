"""offramp.export: a trained multi-exit torch model, or a multi-output ONNX file, becomes a bundle."""

from offramp.export.exporter import export_bundle
from offramp.export.outputs import MultiExitOutput

__all__ = ["MultiExitOutput", "export_bundle"]
