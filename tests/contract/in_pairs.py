"""Parameters of tests in pairs: every two values meet, in far fewer cases than all combinations."""

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import pytest

__all__ = ["in_pairs"]


def in_pairs(**values: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrizes a test such that any two values of different parameters are in one of its cases."""

    def pairs_of(case: tuple[int, ...]) -> set:
        return set(combinations(enumerate(case), 2))

    cases = [*product(*(range(len(choices)) for choices in values.values()))]
    missing = set().union(*map(pairs_of, cases))
    chosen = []
    while missing:
        chosen.append(max(cases, key=lambda case: len(missing & pairs_of(case))))
        missing -= pairs_of(chosen[-1])
    columns = [*values.values()]
    rows = [[columns[place][at] for place, at in enumerate(case)] for case in chosen]
    return pytest.mark.parametrize(",".join(values), rows)
