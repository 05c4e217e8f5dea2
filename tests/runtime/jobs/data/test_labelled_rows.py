import numpy as np
import pytest
from offramp.runtime.errors import InputError
from offramp.runtime.jobs.data.labelled_rows import labelled_rows
from offramp.runtime.jobs.data.opened import own_logits
from offramp.runtime.scores import LARGEST


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_infinite_logits_saturate_and_only_nan_is_refused(dtype):
    logits = [np.zeros((6, 3), dtype) for _ in range(2)]
    logits[0][3, 1] = np.inf
    logits[1][4] = np.inf
    found = labelled_rows(own_logits(logits, [0, 1, 2, 1, 0, -1]).records)
    assert found.score[0, 3] == LARGEST
    assert found.label[0, 3] == 1
    assert found.score[1, 4] == pytest.approx(-np.log(2))
    logits[1][3, 0] = np.nan
    with pytest.raises(InputError, match="NaN scores in row 3: correct the data first"):
        labelled_rows(own_logits(logits, [0, 1, 2, 1, 0, -1]).records)
