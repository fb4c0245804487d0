"""Random programs of eager kernels, views and loops: what shares memory, and for how long, differs in each."""

from random import Random

import pytest
import torch

from .recording import check

N = 6
ONE = {
    "relu": torch.relu,
    "double": lambda x: x * 2,
    "turned": lambda x: x.t(),
    "softmax": lambda x: torch.softmax(x, -1),
    "less the largest": lambda x: x - x.amax(0),
    "over the norm": lambda x: x / (x.abs().sum(1, keepdim=True) + 1),
    "sorted": lambda x: x.sort(-1).values,
    "halves": lambda x: torch.cat([x[N // 2 :], x[: N // 2]]),
    "cumulated": lambda x: x.cumsum(0) / N,
    "flat": lambda x: x.reshape(N // 2, 2 * N).flip(0).reshape(N, N),
    "row": lambda x: x[2].expand(N, N),
    "stretched": lambda x: x[:, ::2].repeat_interleave(2, 1),
}
TWO = {
    "product": lambda a, b: torch.mm(a, b) / N,
    "sum": lambda a, b: a + b,
    "gated": lambda a, b: torch.where(a > 0, b, a),
    "added": lambda a, b: torch.addmm(a, b, b) / N,
    "batched": lambda a, b: torch.bmm(a.expand(2, N, N), b.expand(2, N, N)).mean(0),
    "beside": lambda a, b: a * b.sum(1, keepdim=True).tanh(),
}


def program(seed):
    """A function of two matrices, and what it does."""
    random = Random(seed)
    lines, count = [], 2
    for _ in range(random.randint(4, 14)):
        places = [max(count - 1 - int(random.expovariate(0.7)), 0) for _ in range(2)]
        name = random.choice([*ONE, *TWO])
        lines.append((name, places))
        count += 1
    outputs = sorted(random.sample(range(2, count), min(random.choice((1, 1, 2, 3)), count - 2)))
    if count - 1 not in outputs:
        outputs.append(count - 1)

    def run(a, b):
        values = [a, b]
        for name, places in lines:
            given = [values[i] for i in places]
            values.append(ONE[name](given[0]) if name in ONE else TWO[name](*given))
        return tuple(values[i] for i in outputs)

    return run, (lines, outputs)


@pytest.mark.parametrize("seed", range(0, 24, 8))
def test_random_plans(seed):
    for one in range(seed, seed + 8):
        function, text = program(one)
        a, b = (torch.randn(N, N, generator=torch.Generator().manual_seed(one + i)) for i in (1, 2))
        try:
            check(function, a, b, times=2)
        except AssertionError as error:
            raise AssertionError(f"{text}: {error}") from error
