"""What is told of kernels on a GPU: their records, and their times by events of the stream."""

import pytest
import torch

import kiln
from kiln.observe import roofline
from kiln.observe.calls import Calls

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_kernels_on_a_gpu_have_records_times_and_a_share_of_a_copy():
    compiled = kiln.compile(lambda x: (x * 2 + 1).relu())
    x = torch.randn(1 << 24, device="cuda")
    with kiln.records() as seen, Calls(every=True) as times:
        for _ in range(5):
            compiled(x)
    (kernel,) = seen.kernels
    assert (kernel.device, kernel.reads, kernel.writes) == ("cuda", 1 << 26, 1 << 26)
    (line,) = roofline.lines(seen, times)
    assert line["launches"] == 5 and 0.1 < line["share"] < 2
