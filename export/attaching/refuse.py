"""Models that are no classifiers of one class a row, refused by their name."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from offramp.runtime.errors import ExportError

_TASKS = {
    "ForTokenClassification": "answers for each token",
    "ForQuestionAnswering": "marks places in a text",
    "ForMultipleChoice": "chooses between texts",
    "ForNextSentencePrediction": "was only pre-trained",
    "ForPreTraining": "was only pre-trained",
    "ForMaskedLM": "fills in words",
    "ForMaskedImageModeling": "fills in pictures",
    "ForCausalLM": "generates text",
    "LMHeadModel": "generates text",
    "ForConditionalGeneration": "generates text",
    "ForSeq2SeqLM": "generates text",
    "ForObjectDetection": "finds objects",
    "ForZeroShotObjectDetection": "finds objects",
    "ForSemanticSegmentation": "answers for each pixel",
    "ForInstanceSegmentation": "answers for each pixel",
    "ForUniversalSegmentation": "answers for each pixel",
    "ForDepthEstimation": "answers for each pixel",
}
_WANTED = "expected a classifier with one class a row, such as *ForSequenceClassification or *ForImageClassification"


def refuse(model: Any) -> None:
    """Raises ExportError for what isn't a module, or whose name or configuration says that it does another task."""
    if not isinstance(model, torch.nn.Module):
        raise ExportError(f"model is a {type(model).__name__}: expected a torch.nn.Module, or a checkpoint's folder.")
    name = type(model).__name__
    for ending, does in _TASKS.items():
        if name.endswith(ending):
            raise ExportError(f"{name} {does}: {_WANTED}.")
    config = getattr(model, "config", None)
    if _is_transformers(model) and re.fullmatch(r"\w+(Model|PreTrainedModel)", name):
        raise ExportError(f"{name} has no classifier: {_WANTED}.")
    problem = getattr(config, "problem_type", None)
    if problem == "multi_label_classification":
        raise ExportError(f"{name} gives a row several labels (problem_type {problem!r}): {_WANTED}.")
    if problem == "regression" or (problem is None and getattr(config, "num_labels", 2) == 1):
        raise ExportError(f"{name} estimates a number (num_labels 1, or problem_type 'regression'): {_WANTED}.")
    if getattr(model, "num_classes", None) == 0:
        raise ExportError(f"{name} has num_classes 0, so no classifier: {_WANTED}.")
    training = next((n or name for n, part in model.named_modules() if part.training), None)
    if training is not None:
        raise ExportError(f"{training} is in training mode. Call model.eval() before attaching exits to it.")


def refuse_exits(output: Any) -> None:
    """Raises ExportError for a model that returns several logits a row: it has exits already."""
    given = getattr(output, "logits", output)
    several = list(given.values()) if isinstance(given, Mapping) and "logits" not in given else given
    if not isinstance(several, Sequence):
        return
    shapes = [tuple(one.shape) for one in several if isinstance(one, torch.Tensor) and one.dim() == 2]
    alike = [shape for shape in shapes if shape == shapes[0]]
    if len(alike) > 1:
        raise ExportError(
            f"the model returns {len(alike)} tensors of the shape {list(alike[0])}, so it has exits already: export it "
            "as it is, offramp export. If only one of them is its answer, let forward return that alone."
        )


def _is_transformers(model: torch.nn.Module) -> bool:
    return any(base.__module__.startswith("transformers.") for base in type(model).__mro__)
