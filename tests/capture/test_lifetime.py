"""Nothing leaks: not over calls, not over recompiles, not when a compiled model is dropped; and threads do not mix."""

import gc
import threading
import weakref

import torch

import kiln


def scaled(x, k):
    return torch.relu(x + k) * 2


def alive():
    gc.collect()
    return len(gc.get_objects())


def test_ten_thousand_calls_leave_nothing():
    f, x = kiln.compile(scaled, backend="eager"), torch.randn(4)
    for k in range(3):
        f(x, k)
    before = alive()
    for i in range(10_000):
        f(x, i % 3)
    assert alive() - before < 20


def test_a_thousand_recompiles_leave_nothing():
    f, x = kiln.compile(scaled, backend="eager"), torch.randn(4)
    for _ in range(20):
        kiln.reset()
        f(x, 1)
    before = alive()
    for _ in range(1_000):
        kiln.reset()
        f(x, 1)
    assert alive() - before < 1_000


def test_a_dropped_model_is_freed():
    model, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
    compiled = kiln.compile(model, backend="eager")
    compiled(x)
    weight = weakref.ref(model.weight)
    del model, compiled
    gc.collect()
    assert weight() is None


def test_eight_threads_compile_and_call():
    f, failures = kiln.compile(scaled, backend="eager"), []

    def work(seed):
        generator = torch.Generator().manual_seed(seed)
        for i in range(40):
            x, k = torch.randn(2 + i % 3, generator=generator), (i * 7 + seed) % 5
            if not torch.equal(f(x, k), scaled(x, k)):
                failures.append((seed, i))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
