"""Plans on disk: what is found runs as what was made, and whatever a plan follows from is part of its key."""

import marshal

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kiln
from kiln.base import records
from kiln.launch import kept, program


class Store:
    """A cache in memory."""

    def __init__(self):
        self.files = {}

    def get(self, key):
        return self.files.get(key)

    def put(self, key, data):
        self.files[key] = data

    def plans(self):
        return [key for key, data in self.files.items() if data[:1] in (b")", b"\xa9")]  # a tuple, marshalled


@pytest.fixture
def store(monkeypatch):
    """Where everything is kept; `fused` are the graphs that were fused since."""
    made = Store()
    made.fused = []
    fuse = program.fuse
    monkeypatch.setattr(program, "disk", lambda limit: made)
    monkeypatch.setattr(program, "fuse", lambda *given: made.fused.append(given) or fuse(*given))
    return made


def rand(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def fused_by(store, call):
    """How many graphs are fused in a call."""
    before = len(store.fused)
    call()
    return len(store.fused) - before


def check(f, *inputs, **options):
    """The function compiled anew gives what eager gives."""
    kiln.reset()
    got, expected = kiln.compile(f, fullgraph=True, **options)(*inputs), f(*inputs)
    torch.testing.assert_close(got, expected)


TABLE = torch.arange(8.0)
PROGRAMS = {
    "kernels": lambda x: torch.softmax(x * 2, -1) + F.gelu(x),
    "calls": lambda x: (x + 1) @ x.t() @ torch.sin(x),
    "several results": lambda x: torch.topk(x * 2, 3).values + x.sort(-1).indices[:, :3],
    "lists": lambda x: torch.cat([part * i for i, part in enumerate(x.split(2, 1))], 0),
    "views": lambda x: (x.t(), x[1:3].clone(), x.reshape(-1)[5]),
    "outputs and numbers": lambda x: (x, 3, x.sum(), None),
    "dtypes": lambda x: (x.to(torch.float64).cumsum(0), (x > 0).long(), x.bfloat16() * 2),
    "slices": lambda x: F.pad(x, (1, 2), value=float("-inf")).amax(1),
    "constants": lambda x: x[:, :8] * TABLE + torch.tensor([1.5]),
    "images": lambda x: F.max_pool2d(F.conv2d(x[None, None], torch.ones(2, 1, 3, 3)), 2),
    "searching": lambda x: torch.bucketize(x, torch.tensor([-1.0, 0.0, 1.0])),
    "written": lambda x: x.clone().add_(1).mul_(x)[:, 0].fill_(2.0),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_plan_that_is_found_runs_as_the_one_that_was_made(store, name):
    f = PROGRAMS[name]
    assert fused_by(store, lambda: check(f, rand(8, 12))) == 1
    assert fused_by(store, lambda: check(f, rand(8, 12) + 1)) == 0


def test_training(store):
    model = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))

    def step(f, x):
        model.zero_grad()
        F.cross_entropy(f(x), torch.arange(4)).backward()
        return [p.grad.clone() for p in model.parameters()]

    def compiled():
        kiln.reset()
        x = rand(4, 12)
        torch.testing.assert_close(step(kiln.compile(model), x), step(model, x))

    assert fused_by(store, compiled) == 2
    assert fused_by(store, compiled) == 0 and len(store.plans()) == 2


def test_held_weights_are_packed_anew(store):
    def model(seed):
        torch.manual_seed(seed)
        layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 512)
        return nn.Sequential(*layers).eval()

    def compiled(seed):
        with torch.no_grad():
            mine = model(seed)
            torch.testing.assert_close(kiln.compile(mine)(rand(4, 3, 8, 8)), mine(rand(4, 3, 8, 8)))

    assert fused_by(store, lambda: compiled(0)) == 1
    assert fused_by(store, lambda: compiled(1)) == 0


def test_symbolic_sizes(store):
    def f(x, y):
        return torch.softmax(x @ y, -1) + x.shape[0] * x.sum()

    def compiled(*sizes):
        kiln.reset()
        run = kiln.compile(f, dynamic=True)
        for n in sizes:
            torch.testing.assert_close(run(rand(n, 5), rand(5, 7)), f(rand(n, 5), rand(5, 7)))

    assert fused_by(store, lambda: compiled(4, 9)) == 1
    assert fused_by(store, lambda: compiled(4, 17, 3)) == 0
    # Sizes are chosen for by what they are at first.
    assert fused_by(store, lambda: compiled(6)) == 1


def test_the_key_holds_what_a_plan_follows_from(store, monkeypatch):
    f, x = PROGRAMS["kernels"], rand(8, 12)
    assert fused_by(store, lambda: check(f, x)) == 1
    assert fused_by(store, lambda: check(f, rand(8, 13))) == 1
    assert fused_by(store, lambda: check(f, rand(12, 8).t())) == 1
    assert fused_by(store, lambda: check(f, x, options={"numerics": "eager"})) == 1
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    assert fused_by(store, lambda: check(f, x)) == 1
    torch.set_num_threads(threads)
    assert fused_by(store, lambda: check(f, x)) == 0
    for name in ("_versions", "depends_on"):
        with monkeypatch.context() as patch:
            patch.setattr(kept, name, lambda: "another")
            assert fused_by(store, lambda: check(f, x)) == 1
    assert fused_by(store, lambda: check(f, x, mode="max-autotune")) > 0


def test_values_of_constants_are_part_of_the_key(store):
    def made(value):
        return lambda x: x * torch.tensor([value, 2.0])

    assert fused_by(store, lambda: check(made(1.0), rand(3, 2))) == 1
    assert fused_by(store, lambda: check(made(5.0), rand(3, 2))) == 1


@pytest.mark.parametrize("damage", [
    lambda data: b"", lambda data: data[: len(data) // 2], lambda data: data.replace(b"launch", b"lounge"),
    lambda data: marshal.dumps(((), (), 1)), lambda data: data.replace(b"aten::mm", b"aten::nn"), lambda data: b"\x80\x04N.",
])  # fmt: skip
def test_what_cannot_be_read_is_a_miss(store, damage):
    f = PROGRAMS["calls"]
    check(f, rand(8, 12))
    (key,) = store.plans()
    store.files[key] = damage(store.files[key])
    assert fused_by(store, lambda: check(f, rand(8, 12))) == 1
    assert fused_by(store, lambda: check(f, rand(8, 12))) == 0


def test_a_plan_without_its_code_is_a_miss(store):
    f = PROGRAMS["kernels"]
    check(f, rand(8, 12))
    kiln.reset()
    for key in store.files.keys() - store.plans():
        del store.files[key]
    kept.kept_code.__globals__["_loaded"].clear()
    assert fused_by(store, lambda: check(f, rand(8, 12))) == 1


def test_functions_of_the_program_are_not_kept(store):
    @torch.library.custom_op("kept_test::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    twice.register_fake(lambda x: torch.empty_like(x))
    f = lambda x: twice(x) + 1  # noqa: E731
    assert fused_by(store, lambda: check(f, rand(8))) == 1
    assert fused_by(store, lambda: check(f, rand(8))) == 1 and not store.plans()


def test_who_looks_sees_all_stages(store):
    f = PROGRAMS["kernels"]
    check(f, rand(8, 12))
    with records.collect() as seen:
        assert fused_by(store, lambda: check(f, rand(8, 12))) == 1
    assert sum(code.kernels for code in seen.codes) == 1
