"""What takes items from an iterator and breaks among them: Python sees all of the items."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch

from tests.support import Watch

XS = [torch.tensor(row) for row in ([1.0, -1.0], [1.0, 2.0], [-1.0, 2.0], [1.0, -1.0], [-2.0, -1.0])]


class Items:
    def __init__(self, x):
        self.x, self.at = x, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.at >= 2:
            raise StopIteration
        self.at += 1
        return self.x[self.at - 1] + 0


def parts(x):
    return [x[0] * 1, x[1] * 1]


def positive(v):
    return v > 0


def printed(x):
    print(*(v.item() for v in x))
    return x + 1


def printed_from_the_middle(x):
    numbers = iter(i * 2 for i in range(4))
    next(numbers)
    print(*numbers)
    return x + 1


PROGRAMS = {
    "all": (lambda x: all(v > 0 for v in parts(x)), 1),
    "any": (lambda x: any(v > 0 for v in parts(x)), 1),
    "any of a map": (lambda x: any(map(positive, parts(x))), 1),
    "all of a class's": (lambda x: all(v > 0 for v in Items(x)), 1),
    "filter": (lambda x: list(filter(positive, parts(x))), 1),
    "filter in a loop": (lambda x: [v * 2 for v in filter(positive, (x[i] for i in range(2)))], 3),
    "max": (lambda x: max(v for v in parts(x)), 1),
    "sorted": (lambda x: sorted((v * 1 for v in x), key=lambda v: v.item()), 1),
    "reduce": (lambda x: functools.reduce(lambda a, b: a if a > b else b, (v * 1 for v in x)), 1),
    "takewhile": (lambda x: list(itertools.takewhile(positive, (v * 1 for v in x))), 1),
    "contains": (lambda x: 2.0 in (v.item() for v in x), 2),
    "next": (lambda x: next((i for i, v in enumerate(x) if v > 0), None), 2),
    "printed": (printed, 1),
    "printed from the middle": (printed_from_the_middle, 1),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_item_is_lost(name, capsys):
    program, breaks = PROGRAMS[name]
    watch = Watch(program)
    for x in XS:
        watch(x)
        said = capsys.readouterr().out
        assert said[: len(said) // 2] * 2 == said  # by eager, then by what is compiled
    assert len(watch.breaks) == breaks, watch.breaks
