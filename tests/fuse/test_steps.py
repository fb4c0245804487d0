"""Random training scripts with compiled modules are eager's; KILN_SCRIPTS says how many."""

from __future__ import annotations

import os
from random import Random

import pytest

from tests.fuse.steps import Script, check, drawn

pytestmark = pytest.mark.filterwarnings("ignore")

#: The smallest scripts that once gave something else.
FOUND: dict[str, Script] = {
    "a number that the backward needs": Script("rows", ["Scaled(8)"], (2, 8), events=["attribute"]),
    "momentum that follows a count": Script("rows", ["nn.BatchNorm1d(8, momentum=None)"], (3, 8), events=["grad"]),
    "a view without grad mode claims to require grad": Script("tokens", [], (3, 2, 8), "view of input", ["input grad", "no_grad"]),
    "second derivatives of what counts its calls": Script("rows", ["Counted()", "Several(8)"], (2, 8), events=["input grad", "double backward"]),
    "strides of a whole layer": Script("tokens", ["nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True)", "Places(8)"], (2, 9, 8),
                                       events=["no_grad", "channels last", "eval"]),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_script(name: str) -> None:
    check(FOUND[name])


@pytest.mark.parametrize("seed", range(int(os.environ.get("KILN_SCRIPTS", "24"))))
def test_random_script(seed: int) -> None:
    check(drawn(Random(seed)))
