"""An op that raises only when it runs: the frame runs again in Python, so its own handlers see the exception."""

import torch

from tests.support import kiln, pin, same_as_eager, t

X, FAR = t(4), torch.tensor([9])


def test_a_handler_sees_an_error_of_the_data():
    def f(x, i):
        try:
            return torch.gather(x, 0, i)
        except RuntimeError:
            return x * 0

    pin(same_as_eager(f, X, FAR))


def test_modes_are_left_when_the_error_leaves():
    def f(x, i):
        y = x + 1
        with torch.no_grad():
            return y.gather(0, i)

    r = same_as_eager(f, t(4, grad=True), FAR)
    assert isinstance(r.raised, RuntimeError) and torch.is_grad_enabled()


def test_writes_before_the_error_happen_once():
    log = []

    def f(x, i):
        log.append(1)
        return x.gather(0, i)

    compiled = kiln.compile(f, backend="eager")
    for _ in range(2):
        try:
            compiled(X, FAR)
        except RuntimeError:
            pass
    assert log == [1, 1]


def test_a_graph_that_writes_is_not_run_twice():
    def f(x, i):
        x.add_(1)
        return x.gather(0, i)

    x = torch.zeros(4)
    try:
        kiln.compile(f, backend="eager")(x, FAR)
    except RuntimeError:
        pass
    assert x.tolist() == [1.0] * 4


def test_one_line_tells_that_a_graph_raised_and_the_frame_did_not(caplog):
    def f(x, i):
        try:
            return torch.gather(x, 0, i)
        except RuntimeError:
            return x * 0

    compiled = kiln.compile(f, backend="eager")
    for _ in range(2):
        compiled(X, FAR)
    told = [r.getMessage() for r in caplog.records if "ran in Python since its graph raised" in r.getMessage()]
    assert len(told) == 1 and "f ran" in told[0] and "RuntimeError: index 9 is out of bounds" in told[0]
