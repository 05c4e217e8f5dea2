"""Raw rows: texts, and pictures as base64, through the preprocessing that the bundle brings."""

import base64
import binascii
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from offramp.runtime.bundle import Manifest
from offramp.runtime.cascade import Cascade
from offramp.runtime.errors import InputError, RuntimeUnavailable
from offramp.runtime.inputs import check_inputs
from offramp.runtime.preprocess import Image, Text
from offramp.server.errors import NotSupported, TooLarge
from offramp.server.patience import Patience
from offramp.server.query import Group


class RawValues:
    """What a bundle takes beside arrays. kind: "text", "image", or None where the manifest says nothing of it."""

    def __init__(self, manifest: Manifest) -> None:
        spec = manifest.preprocess
        self.kind = None if spec is None else "text" if isinstance(spec, Text) else "image"
        self._names = {given.name for given in manifest.inputs}
        self._keys = {"text": ("text",), "image": ("b64",), None: ("text", "b64")}[self.kind]

    def meant(self, instances: Sequence[Any]) -> bool:
        """Whether the instances of a /v1/predict request are raw rows rather than arrays: the first tells.

        What has nothing of the model's inputs counts as a raw row gone wrong where the bundle takes any.
        """
        if not instances:
            return False
        first = instances[0]
        if self._value(first) is not None:
            return True
        if self.kind is None:
            return False
        return not self._names & first.keys() if isinstance(first, dict) else len(self._names) > 1

    def _value(self, instance: Any) -> str | None:
        """The text or base64 of a raw instance: the bare string, or {"text": …} or {"b64": …}."""
        if isinstance(instance, dict) and len(instance) == 1:
            (name, value), *_ = instance.items()
            if name in self._keys and name not in self._names and isinstance(value, str):
                return value
        return instance if isinstance(instance, str) else None

    def of_instances(self, instances: Sequence[Any]) -> list[str]:
        """The texts, or pictures in base64, of a /v1/predict request. Raises InputError naming the instance."""
        found = [self._value(instance) for instance in instances]
        for k, value in enumerate(found):
            if value is None:
                raise InputError(self._no_raw_row(instances[k], k, alone=found[0] is None))
        return [value for value in found if value is not None]

    def _no_raw_row(self, instance: Any, k: int, *, alone: bool) -> str:
        """What is wrong with an instance. alone: no other one has been a raw row, so arrays may have been meant."""
        what, name = ("a text", "text") if self.kind == "text" else ("a picture in base64", "b64")
        raw = f'{what}, as a string or {{"{name}": "…"}}'
        if isinstance(instance, dict) and name in instance and not isinstance(instance[name], str):
            return f'instances[{k}]["{name}"] is {_shown(instance[name])}, expected {what} as a string.'
        got = f"has {sorted(map(str, instance))}" if isinstance(instance, dict) else f"is {_shown(instance)}"
        if alone:
            return f"instances[{k}] {got}, expected {raw}, or an object with the model's inputs {sorted(self._names)}."
        return f"instances[{k}] {got}, expected {raw}, as instances[0] is: send one kind of them."


class RawRows:
    """Raw rows as the model's inputs."""

    def __init__(self, cascade: Cascade, limit: int) -> None:
        """limit: bytes that one request's pictures may take as numbers."""
        self._limit = limit
        spec = cascade.manifest.preprocess
        self.kind = RawValues(cascade.manifest).kind
        # The largest of a picture's dtypes is float64.
        self._picture_bytes = 8 * math.prod(spec.shape) if isinstance(spec, Image) else 0
        self._cascade = cascade

    def _check_pictures(self, count: int) -> None:
        """A file of a hundred bytes may be a picture of any size, so their bytes say nothing about it."""
        size = count * self._picture_bytes
        if size > self._limit:
            raise TooLarge(
                f"{count} pictures take {size} bytes as numbers, this server allows {self._limit}. "
                "Send fewer at a time."
            )

    def groups(self, values: Sequence[str], where: str, patience: Patience) -> tuple[Group, ...]:
        """Texts, or pictures in base64, as the model's inputs. where: the field they came in, for messages.

        patience: looked at before each picture; texts are tokenised at once. Raises TooLarge for more pictures than
        may be numbers at once.
        """
        if self.kind is None:
            raise InputError(
                f"{where}[0] is a string, and this bundle says nothing about raw rows: send arrays of numbers, or "
                "export it with preprocess=."
            )
        rows: Iterable[Any] = values
        if self.kind == "image":
            self._check_pictures(len(values))
            rows = _pictures(values, where, patience)
        try:
            parts = self._cascade.preprocess_by_length(rows)
        except InputError as error:
            raise InputError(f"{where}: {error}") from error
        except RuntimeUnavailable as error:
            raise NotSupported(f"{where}: {error}") from error
        made = []
        for positions, inputs in parts:
            arrays, sizes = check_inputs(inputs, self._cascade.manifest)
            made.append(Group(arrays, sizes, np.asarray(positions, np.int64)))
        return tuple(made)


def _shown(value: Any) -> str:
    """A value in a message: what it is where it is long."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _pictures(values: Sequence[str], where: str, patience: Patience) -> Iterator[bytes]:
    for k, value in enumerate(values):
        patience.check()
        yield _picture(value, f"{where}[{k}]")


def _picture(value: str, where: str) -> bytes:
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InputError(f"{where} isn't base64 ({error}): expected that of a PNG or JPEG file.") from error
