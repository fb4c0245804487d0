"""`kiln.profile` on a GPU: the same names as on the CPU."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import kiln

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore:.*Profiler clears events", "ignore:.*no current CUDA context"),
]


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_functions_graphs_kernels_and_calls_are_named(mode):
    compiled = kiln.compile(lambda x, w: torch.softmax((x @ w).relu() * 2, -1).sum(), mode=mode)
    x = torch.randn(64, 128, device="cuda")
    w = torch.randn(128, 128, device="cuda", requires_grad=True)
    for _ in range(4):
        compiled(x, w).backward()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace, kiln.profile():
        compiled(x, w).backward()
        torch.cuda.synchronize()
    names = {event.name for event in trace.events() if event.name.startswith("kiln.")}
    assert any(name.startswith("kiln.function") for name in names)
    for half in ("forward", "backward"):
        assert any(name.startswith("kiln.graph") and name.endswith(half) for name in names)
    assert any(name.startswith("kiln.kernel") for name in names)
    assert any(name.startswith("kiln.call") and "mm" in name for name in names)
