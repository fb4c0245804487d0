"""Tracebacks and debuggers see the program: eager's lines, and generated code under a name of its own."""

import gc
import io
import linecache
import pdb
import traceback

import pytest
import torch

import kiln

TABLE, WRONG = torch.ones(4, 3), torch.tensor([9])
BACKENDS = ("kiln", "aot_eager", "eager")


def embed(table, i):
    y = table * 2
    return torch.nn.functional.embedding(i, y)


def calls(table, i):
    z = embed(table, i)
    return z + 1


def raises_after_break(x):
    y = x + 1
    kiln.graph_break()
    if y.shape[0] == 3:
        raise ValueError("three")
    return y


def break_inside(x):
    y = x + 1
    kiln.graph_break()
    return y[torch.tensor([7])]


def resumes(x):
    a = x.sin()
    b = break_inside(a)
    return b.cos()


def caller_fails(x):
    a = break_between(x)
    return a[WRONG]


def break_between(x):
    y = x + 1
    kiln.graph_break()
    return y * 2


def singular(x):
    y = x.sin()
    return torch.linalg.inv(y) + 1


def from_a_value(x):
    n = int(x.sum().item())
    return [1, 2][n]


def a_loop(x):
    for i in range(3):
        kiln.graph_break()
        x = x + [1, 2][i]
    return x


def handled(x):
    try:
        return embed(x, WRONG)
    except IndexError as error:
        raise KeyError("no row") from error


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = torch.nn.Embedding(4, 3)
        self.rest = torch.nn.Linear(3, 3)

    def forward(self, i):
        return self.rest(self.rows(i))


PROGRAMS = {
    "index in an inlined call": (calls, (TABLE, WRONG)),
    "index with gradients": (calls, (TABLE.clone().requires_grad_(), WRONG)),
    "raise after a break": (raises_after_break, (torch.ones(3),)),
    "in a resumed inner call": (resumes, (torch.ones(3),)),
    "in the caller of a break": (caller_fails, (torch.ones(3),)),
    "singular matrix": (singular, (torch.zeros(3, 3),)),
    "from a value": (from_a_value, (torch.full((3,), 5.0),)),
    "a loop of breaks": (a_loop, (torch.ones(3),)),
    "another exception in a handler": (handled, (TABLE,)),
    "a module": (Model(), (WRONG,)),
}


def told(function, args):
    """The traceback of a call that raises."""
    try:
        function(*args)
    except Exception as error:
        # Without this function's own line, which names what it calls.
        error.__traceback__ = error.__traceback__.tb_next
        return "".join(traceback.format_exception(error))
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_tracebacks_are_those_of_eager(name, backend):
    function, args = PROGRAMS[name]
    expected = told(function, args)
    compiled = kiln.compile(function, backend=backend)
    assert told(compiled, args) == expected
    assert told(compiled, args) == expected  # and when nothing is captured any more


def writes(table, i, out):
    out.add_(1)
    z = embed(table, i)
    return z + out.sum()


def lines(text):
    """The lines of this file in a traceback, with the functions they are in."""
    return [line.split(", ", 1)[1] for line in text.splitlines() if __file__ in line]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_graph_that_writes_shows_the_lines_of_the_op_that_raised(backend):
    expected = lines(told(writes, (TABLE, WRONG, torch.zeros(3))))
    text = told(kiln.compile(writes, backend=backend), (TABLE, WRONG, torch.zeros(3)))
    assert lines(text) == expected and len(expected) == 2
    assert text.endswith("IndexError: index out of range in self\n")
    assert "/kiln/" not in text and "<kiln" not in text and "eval_with_key" not in text


def test_faults_of_kiln_keep_their_traceback():
    def refuses(graph, inputs):
        raise LookupError("a fault of the backend")

    text = told(kiln.compile(calls, backend=refuses), (TABLE, torch.tensor([1])))
    assert "in refuses" in text and "LookupError: a fault of the backend" in text


def stepped(compiled, x):
    y = x + 1
    kiln.graph_break()
    z = y * 2
    return z


def debugged(function, args, commands):
    """What a debugger shows for these commands, without its own frames."""
    out = io.StringIO()
    debugger = pdb.Pdb(stdin=io.StringIO("\n".join(commands) + "\n"), stdout=out, nosigint=True, readrc=False)
    debugger.use_rawinput = False
    debugger.prompt = ""
    result = debugger.runcall(function, *args)
    return result, out.getvalue()


@pytest.mark.parametrize("known", [False, True], ids=["first call", "later call"])
def test_a_debugger_steps_through_residual_code(known):
    compiled = kiln.compile(stepped, backend="eager")
    if known:
        compiled(None, torch.ones(2))

    def program(x):
        return compiled(None, x)

    result, shown = debugged(program, (torch.ones(2),), ["step"] * 40 + ["continue"])
    torch.testing.assert_close(result, torch.full((2,), 4.0))
    first = stepped.__code__.co_firstlineno
    assert f"{__file__}({first + 2})stepped()\n-> kiln.graph_break()" in shown
    assert "<kiln stepped" in shown and "-> __out = forward(x)" in shown
    inner = [line for line in shown.splitlines() if line.startswith("> ") and "/kiln/" in line]
    assert all("graph_break" in line for line in inner)  # which the program calls itself


def test_a_debugger_lists_generated_code():
    compiled = kiln.compile(stepped, backend="eager")
    _, shown = debugged(lambda x: compiled(None, x), (torch.ones(2),), ["step", "step", "list", "where", "continue"])
    assert "1  ->\tdef stepped(compiled, x):" in shown or "1  \tdef stepped(compiled, x):" in shown
    assert "__out = forward(x)" in shown and "return later(stepped, graph_break, __out[0])" in shown


def test_generated_text_goes_with_its_code():
    kiln.reset()
    gc.collect()
    before = {name for name in linecache.cache if name.startswith("<kiln")}
    compiled = kiln.compile(stepped, backend="eager")
    compiled(None, torch.ones(2))
    made = {name for name in linecache.cache if name.startswith("<kiln")} - before
    assert made and all(linecache.getlines(name)[0].startswith("def stepped(") for name in made)
    kiln.reset()
    gc.collect()
    assert not made & set(linecache.cache)
