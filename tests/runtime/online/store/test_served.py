"""A batch that can't be kept is refused where it is made, by its field."""

import numpy as np
import pytest
from kept_rows import rows
from offramp.runtime.errors import InputError


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"request": ["a", ""]}, r"request\[1\] is ''"),
        ({"request": ["a", "x" * 201]}, r"request\[1\] is 'x.*201 characters"),
        ({"request": ["a", 7]}, r"request\[1\] is 7"),
        ({"score": np.zeros((3, 4))}, "score has the shape"),
        ({"logits": [None]}, "logits has 1 exits"),
        ({"inputs": [b""]}, "inputs has 1 rows"),
    ],
)
def test_what_does_not_fit_is_named(change, said):
    with pytest.raises(InputError, match=said):
        rows(["a", "b"], **change)


def test_the_first_rows_are_a_batch_of_their_own():
    whole = rows(["a", "b", "c"], row=[4, 5, 6], time=7.0, left=1, inputs=[b"x", b"yy", b"zzz"])
    part = whole.first(2)
    assert list(part.request) == ["a", "b"]
    assert np.asarray(part.row).tolist() == [4, 5]
    assert part.score.shape == (3, 2)
    assert [z is None or z.shape == (2, 5) for z in part.logits] == [True] * 3
    assert part.inputs == [b"x", b"yy"]
    assert part.nbytes < whole.nbytes
