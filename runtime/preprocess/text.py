"""Texts to token ids, by the bundle's own tokenizer. Needs `tokenizers`, loaded when the first one is opened."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from offramp.runtime.errors import BundleError, InputError, RuntimeUnavailable, how_to_install
from offramp.runtime.preprocess.spec import Text

# Truncation comes after tokenisation, so a text of any length would be worked through first.
MOST_CHARACTERS = 1_000_000
Tokens = NDArray[np.int64]


class TextPreprocessor:
    """Texts in, the model's inputs out. Any number of threads may use it at once."""

    def __init__(self, spec: Text, tokenizer: Path, dtypes: dict[str, Any], length: int | None, mixed: bool) -> None:
        """dtypes: of the model's inputs. length: fixed number of tokens, or None. mixed: rows may be padded."""
        self.spec = spec
        self._dtypes, self._length, self._mixed = dtypes, length, mixed
        self._tokenizer = _open(tokenizer, spec)

    def __call__(self, rows: Iterable[Any], *, first: int = 0) -> dict[str, NDArray[Any]]:
        """The model's inputs for texts, as long as the longest needs. first: number of the first row, for messages.

        Raises InputError for what isn't a text, is longer than the model takes (unless it is to be cut), or
        for texts of several lengths if this model can't take padded rows.
        """
        return self.pad(self.encode(rows, first=first))

    def encode(self, rows: Iterable[Any], *, first: int = 0) -> list[Tokens]:
        """One (2, tokens) array a text, of ids and of the types that the tokenizer's template gives, not padded yet.

        A text without any token gets one pad token, attended to.
        """
        encodings = self._encodings(_texts(rows, first), first)
        return [np.array([e.ids, e.type_ids] if e.ids else [[self.spec.pad_id], [0]], np.int64) for e in encodings]

    def parts(self, rows: Iterable[Any], *, first: int = 0) -> list[tuple[Tokens, dict[str, NDArray[Any]]]]:
        """(positions, inputs) by length, shortest first: no row is padded by its neighbours."""
        encoded = self.encode(rows, first=first)
        alike: dict[int, list[int]] = {}  # np.unique lets go of Python's lock, and waits for it again
        for position, tokens in enumerate(encoded):
            alike.setdefault(self._length or tokens.shape[1], []).append(position)
        return [
            (np.array(positions), self.pad([encoded[i] for i in positions])) for _, positions in sorted(alike.items())
        ]

    def pad(self, encoded: Sequence[Tokens]) -> dict[str, NDArray[Any]]:
        """Rows from `encode` as the model's inputs. Zero rows have one token each."""
        spec = self.spec
        lengths = [tokens.shape[1] for tokens in encoded]
        if not self._mixed and self._length is None and len(set(lengths)) > 1:
            raise InputError(
                f"the texts have {min(lengths)} to {max(lengths)} tokens, and this model can't take padded rows: "
                "give texts of one length at a time."
            )
        width = self._length or max(lengths, default=1)
        if len(encoded) == 1 and lengths[0] == width:  # as most requests are
            ids, kinds, mask = encoded[0][:1], encoded[0][1:], np.ones((1, width), np.int64)
        else:
            ids = np.full((len(encoded), width), spec.pad_id, np.int64)
            mask, kinds = np.zeros_like(ids), np.full_like(ids, spec.pad_type_id)
            for row, tokens in enumerate(encoded):
                n = tokens.shape[1]
                at = slice(0, n) if spec.padding == "right" else slice(width - n, width)
                ids[row, at], mask[row, at], kinds[row, at] = tokens[0], 1, tokens[1]
        made = {spec.ids: ids, spec.mask: mask, spec.type_ids: kinds}
        return {name: values.astype(self._dtypes[name]) for name, values in made.items() if name is not None}

    def _encodings(self, texts: list[str], first: int) -> Any:
        special = self.spec.special_tokens
        try:
            if len(texts) == 1:  # a batch of one would still wake the library's threads
                encodings = [self._tokenizer.encode(texts[0], add_special_tokens=special)]
            else:
                encodings = self._tokenizer.encode_batch(texts, add_special_tokens=special)
        except Exception as error:  # the tokenizer's own errors have no base of their own
            raise InputError(f"the texts can't be tokenised ({error}).") from error
        for row, encoding in enumerate(encodings, first):
            if len(encoding.ids) > self.spec.max_length:
                raise InputError(
                    f"row {row} has {len(encoding.ids)} tokens, expected at most {self.spec.max_length}: shorten it."
                )
        return encodings


def _open(path: Path, spec: Text) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise RuntimeUnavailable(
            f"raw texts need the library tokenizers, which isn't installed. {how_to_install('text')}"
        ) from error
    try:
        tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # as above; a damaged file gives a bare Exception
        raise BundleError(f"{path}: not a tokenizer.json that tokenizers can read ({error}).") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    if spec.truncation is not None:
        try:
            tokenizer.enable_truncation(spec.max_length, direction=spec.truncation)
        except Exception as error:
            raise BundleError(f"{path}: can't cut rows to max_length {spec.max_length} ({error}).") from error
    return tokenizer


def _texts(rows: Iterable[Any], first: int) -> list[str]:
    if isinstance(rows, str | bytes) or not isinstance(rows, Iterable):
        raise InputError(f"texts: expected a list of strings, got {type(rows).__name__}.")
    texts = []
    for row, text in enumerate(rows, first):
        if not isinstance(text, str):
            raise InputError(f"row {row} is {_shown(text)}, expected a text.")
        if len(text) > MOST_CHARACTERS:
            raise InputError(f"row {row} has {len(text)} characters, expected at most {MOST_CHARACTERS}.")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                f"row {row} has half a surrogate pair, which is no character: correct the text's encoding."
            ) from error
        texts.append(str(text))
    return texts


def _shown(value: Any) -> str:
    return "missing" if value is None else f"of type {type(value).__name__}"
