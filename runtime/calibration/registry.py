"""Calibrators by name."""

from collections.abc import Mapping
from typing import Any, TypeVar

from offramp.runtime.calibration.protocol import Calibrator
from offramp.runtime.errors import InputError

Kind = TypeVar("Kind", bound=type[Calibrator])

_registry: dict[str, type[Calibrator]] = {}


def register(kind: Kind) -> Kind:
    """Make a Calibrator class available under its `name`; usable as a decorator. Replaces one of that name."""
    name = getattr(kind, "name", None)
    if not isinstance(name, str) or not name:
        raise InputError(f"calibrator {kind.__name__}: expected a class attribute `name`.")
    _registry[name] = kind
    return kind


def unregister(name: str) -> None:
    """Take a calibrator's name back; bundles that have one of that name can't be loaded from then on."""
    kind(name)
    del _registry[name]


def names() -> tuple[str, ...]:
    """All registered names."""
    return tuple(_registry)


def kind(name: str) -> type[Calibrator]:
    """The class of that name."""
    if name not in _registry:
        raise InputError(f"calibrator: expected one of {', '.join(_registry)}, got {name!r}.")
    return _registry[name]


def get(name: str, **options: Any) -> Calibrator:
    """A fresh, unfitted calibrator of that name."""
    chosen = kind(name)
    try:
        return chosen(**options)
    except TypeError as error:
        raise InputError(f"{name}: {error}.") from None


def from_dict(data: Mapping[str, Any]) -> Calibrator:
    """The fitted calibrator that some calibrator's `to_dict` described."""
    return kind(str(data.get("name"))).from_dict(data)
