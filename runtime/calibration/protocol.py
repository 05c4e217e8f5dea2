"""What every calibrator is: fitted on one exit's logits, labels and auxiliary features, applied to new rows."""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Self, cast

import numpy as np
from numpy.typing import ArrayLike
from offramp.runtime import arrays, scores
from offramp.runtime.arrays import Array, Floats, Ints
from offramp.runtime.errors import InputError

Aux = Mapping[str, ArrayLike]


class Given:
    """What is known of some rows, read by name; what is missing is derived from the logits where they are there.

    Names: score (N,) raw log-odds, label (N,), entropy (N,) negated predictive entropy as in
    `scores.entropy`, logits (N, C), routing (L, N) normalised routing entropies.
    """

    def __init__(self, values: Mapping[str, ArrayLike]) -> None:
        self._values: dict[str, Any] = dict(values)

    def has(self, name: str) -> bool:
        return self._values.get(name) is not None

    def _derived(self, name: str) -> Any:
        value = self._values.get(name)
        if value is None:
            if self._values.get("logits") is None or name in ("logits", "routing"):
                raise InputError(f'given: needs "{name}", found {sorted(self._values) or "nothing"}.')
            derive = {"score": scores.log_odds, "label": scores.top_label, "entropy": scores.entropy}[name]
            value = self._values[name] = derive(self._values["logits"])
        return value

    @property
    def score(self) -> Array:
        return np.asarray(self._derived("score"))

    @property
    def label(self) -> Ints:
        return np.asarray(self._derived("label")).astype(np.int64, copy=False)

    @property
    def entropy(self) -> Floats:
        return np.asarray(self._derived("entropy"), np.float64)

    @property
    def logits(self) -> Array:
        return arrays.matrix(self._derived("logits"))

    @property
    def routing(self) -> Floats:
        routing = np.asarray(self._derived("routing"), np.float64)
        if routing.ndim != 2:
            raise InputError(f"routing: expected shape (layers, rows), got {routing.shape}.")
        return routing

    def extra(self, name: str) -> Any:
        """Anything else by name, for calibrators of a user's own."""
        return self._derived(name)


class Calibrator(ABC):
    """Base of all calibrators. Subclasses are fitted once and then only read.

    preserves_argmax: applying it never changes a row's label.
    preserves_ranking: the order of rows by calibrated confidence is that by raw score, ties included.
    needs: what `score` and `confidence` read, of "score", "label", "entropy", "logits", "routing".
    """

    name: ClassVar[str]
    version: ClassVar[int] = 1
    preserves_argmax: bool = False
    preserves_ranking: bool = False
    needs: frozenset[str] = frozenset({"logits"})

    classes_: int | None = None

    def fit(
        self,
        logits: ArrayLike,
        labels: ArrayLike,
        *,
        aux: Aux | None = None,
        weights: ArrayLike | None = None,
    ) -> Self:
        """Fit on (N, C) logits and (N,) labels; rows labelled −1 are left out.

        aux: auxiliary outputs of the same rows, {"routing": (L, N)}. weights: (N,) ≥ 0, default 1 a row.
        Returns self. NaN is refused with the row numbers; so is a fit without any labelled row.
        """
        z = arrays.matrix(logits)
        y = arrays.labels(labels, *z.shape)
        w = arrays.weights(weights, len(z))
        refuse_nan_rows(z)
        keep = y >= 0
        if w is not None:
            keep &= w > 0
        if not keep.any():
            raise InputError("labels: expected at least one labelled row with a weight above 0.")
        extra = {} if aux is None else dict(aux)
        if not keep.all():
            z, y, w = z[keep], y[keep], None if w is None else w[keep]
            extra = {name: np.asarray(value)[..., keep] for name, value in extra.items()}
        self.classes_ = z.shape[1]
        self._fit(z, y, extra, w)
        return self

    @abstractmethod
    def _fit(self, z: Array, y: Ints, aux: Mapping[str, Any], w: Floats | None) -> None:
        """Set the fitted values from checked input: no NaN, all rows labelled, weights None or > 0."""

    def apply(self, logits: ArrayLike, aux: Aux | None = None) -> Array:
        """(N, C) logits -> (N, C) calibrated probabilities, float32 for float32 logits, else float64."""
        self._check_fitted()
        z = arrays.matrix(logits)
        if self.classes_ is not None and z.shape[1] != self.classes_:
            raise InputError(f"logits: expected {self.classes_} classes as in fit, got {z.shape[1]}.")
        refuse_nan_rows(z)
        return self._apply(z, {} if aux is None else aux)

    @abstractmethod
    def _apply(self, z: Array, aux: Mapping[str, Any]) -> Array: ...

    def score(self, given: Mapping[str, ArrayLike]) -> Floats:
        """(N,) float64 log-odds of the calibrated confidence, within ±float32's largest; NaN where the row's
        raw score is."""
        self._check_fitted()
        known = Given(given)
        with np.errstate(invalid="ignore"):
            odds = np.asarray(self._score(known), np.float64)
            odds = np.clip(odds, -scores.LARGEST, scores.LARGEST)
        if known.has("score"):
            odds = np.where(np.isnan(known.score), np.nan, odds)
        return odds

    @abstractmethod
    def _score(self, given: Given) -> Array: ...

    def confidence(self, given: Mapping[str, ArrayLike]) -> Floats:
        """(N,) float64 calibrated probability that the label is right, in [0, 1]."""
        return scores.sigmoid(self.score(given))

    def graph_inputs(self, classes: int) -> dict[str, Floats] | None:
        """{"scale", "bias", "inv_temperature"}, each (C,), where the exported graph can do all of it; else None.

        The graph computes z' = scale·z + bias, its label, and the log-odds at inv_temperature[label].
        """
        return None

    # ------------------------------------------------------------ value

    def __eq__(self, other: object) -> bool:
        """Whether both are of one kind, with equal options and fitted values: what `to_dict` says, to the last bit."""
        if type(self) is not type(other) or not isinstance(other, Calibrator):
            return NotImplemented
        # As JSON, in which a NaN is itself.
        return json.dumps(self.to_dict()) == json.dumps(other.to_dict())

    def __hash__(self) -> int:
        return hash(type(self))  # it may still be fitted: only what never changes

    # ------------------------------------------------------------ storage

    def options(self) -> dict[str, Any]:
        """The keyword arguments that make an equal unfitted instance."""
        return {}

    def _check_fitted(self) -> None:
        if self.classes_ is None:
            raise InputError(f"{self.name}: call fit(logits, labels) first.")

    def _fitted(self) -> dict[str, Any]:
        """Attributes that end in '_' and don't begin with it."""
        return {key: value for key, value in vars(self).items() if key.endswith("_") and not key.startswith("_")}

    def to_dict(self) -> dict[str, Any]:
        """JSON-able, exact: Python's JSON writes the shortest decimal that reads back to the same float."""
        return {
            "name": self.name,
            "version": self.version,
            "options": self.options(),
            "fitted": {key[:-1]: _plain(value) for key, value in self._fitted().items()},
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The calibrator that `to_dict` described. Raises InputError for what can't answer a row."""
        if data.get("name") != cls.name:
            raise InputError(f'calibrator: expected name "{cls.name}", got {data.get("name")!r}.')
        if data.get("version") != cls.version:
            raise InputError(f"{cls.name}: expected version {cls.version}, got {data.get('version')!r}.")
        made, fitted = cls(**data.get("options", {})), data.get("fitted", {})
        if not isinstance(fitted, Mapping):
            raise InputError(f"{cls.name}: fitted is {fitted!r}, expected values by name.")
        for key, value in fitted.items():
            setattr(made, key + "_", _array(value))
        made._answer_a_row()
        return made

    def _answer_a_row(self) -> None:
        """What a stored calibrator lacks, or has of another kind, shows now and not when the first row leaves."""
        self._check_fitted()
        classes = 2 if self.classes_ is None else self.classes_
        try:
            row, aux = np.zeros((1, classes), np.float32), {"routing": np.zeros((1, 1))}
            self.score({"logits": row, **aux})
            self.apply(row, aux)
        except Exception as error:  # whatever its formula does with such values
            raise InputError(f"{self.name}: can't answer a row with what it was fitted to ({error}).") from error


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return {"array": _spelled(value.tolist()), "dtype": str(value.dtype), "shape": list(value.shape)}
    return _spelled(value.item() if isinstance(value, np.generic) else value)


def _spelled(value: Any) -> Any:
    """±inf as strings: JSON has no infinity."""
    if isinstance(value, list):
        return [_spelled(item) for item in value]
    if isinstance(value, float) and np.isinf(value):
        return "inf" if value > 0 else "-inf"
    return value


def _array(value: Any) -> Any:
    if isinstance(value, Mapping) and "array" in value:
        return np.array(value["array"], dtype=object).astype(value["dtype"]).reshape(value["shape"])
    return float(value) if value in ("inf", "-inf") else value


def refuse_nan_rows(z: Array) -> None:
    """InputError naming the rows of (N, C) logits that hold a NaN; one pass, no N×C temporary."""

    def work(rows: slice) -> Array:
        block = z[rows]
        with np.errstate(invalid="ignore"):
            if not np.isnan(block.max()):
                return np.empty(0, np.int64)
        return cast(Array, rows.start + np.flatnonzero(np.isnan(block).any(axis=1)))

    if not len(z):
        return
    found = np.concatenate(arrays.for_each_block(work, len(z), z.shape[1], arrays.SCAN_VALUES))
    if len(found):
        raise InputError(f"logits: NaN in {arrays.describe_rows(found)}.")
