"""Names of requests: each its own, and in the order of time."""

import random
import re
import time

from offramp.runtime.online.names import new_name


def test_no_two_are_the_same_even_where_the_generator_begins_anew():
    names = []
    for _ in range(50):
        random.seed(1)
        names += [new_name() for _ in range(200)]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch("[0-9a-f]{32}", name) for name in names)


def test_later_ones_stand_behind_earlier_ones():
    names = []
    for _ in range(20):
        names.append(new_name())
        time.sleep(0.001)
    assert names == sorted(names)
