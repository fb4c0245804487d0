"""Breaks: where the graph ends, that the callers' graphs are kept, that the rest goes on, and what the refusal says."""

from __future__ import annotations

import contextlib
import logging
import os  # noqa: F401
import re
import time

import pytest
import torch

from tests.support import EAGER, Counting, How, Watch, kiln, ops_of, pin, same_as_eager, t

if not EAGER:
    from kiln.base.errors import Break

X = t(3, 4)
G = t(3, 4, grad=True)
needs_kiln = pytest.mark.skipif(EAGER, reason="asks Kiln itself")
SEEN: list = []


def outside(*values):
    """What no graph can hold: native code with an effect."""
    SEEN.extend(values)


@kiln.disable
def disabled(x):
    SEEN.append("disabled")
    return x * 3


def field(a, b):
    x = (a + b) / 2.0
    if x.sum() < 0:
        return x * -1.0
    return x


def test_the_example_of_the_field():
    w = Watch(field)
    w(-torch.ones(4), -torch.ones(4))
    w.pin(graphs=2, breaks=1)
    w(torch.ones(4), torch.ones(4))
    w(-torch.ones(4) * 2, torch.ones(4))
    w.pin(graphs=2, breaks=1, recompiles=0)
    if not EAGER:
        first, second = w.backend.modules
        assert [n.target.__name__ if callable(n.target) else n.target for n in ops_of(second)] in (["mul"], ["__mul__"])
        assert len(ops_of(first)) == 4
        assert len(next(n for n in first.graph.nodes if n.op == "output").args[0]) == 2


@needs_kiln
def test_explain_shows_graphs_break_and_bytecode():
    text = str(kiln.explain(field)(-torch.ones(4), -torch.ones(4)))
    for part in ("2 graphs, 5 ops", "1 break", "branch-on-tensor", "if x.sum() < 0:", "^^^", "remedy:", "torch.where"):
        assert part in text, f"{part!r} is not in\n{text}"


# Every kind of break: statement, kind. Each stands between two ops, in each of the surroundings below.
KINDS = {
    "if x.sum() > 0: n += 1": "branch-on-tensor",
    "while n < x.sum() * 0: n += 1": "branch-on-tensor",
    "n += 1 if x.sum() > 0 else 2": "branch-on-tensor",
    "n = n if bool(x.any()) else 0": "branch-on-tensor",
    "if x.sum() > 1e9: x = x + 1": "branch-on-tensor",
    "n += x.long().sum().item() * 0": "data-dependent",
    "n += int(x.sum()) * 0": "data-dependent",
    "n += len(x.tolist())": "data-dependent",
    "n += len(x.detach().numpy().tobytes())": "numpy",
    "n += x.unique().shape[0] * 0": "data-dependent",
    "print(end='')": "io",
    "os.stat('/')": "native-call",
    "kiln.graph_break('because')": "graph-break-called",
    "disabled(x)": "disabled",
    "time.sleep(0)": "native-call",
}  # fmt: skip

SURROUNDINGS = {
    "plain": "{s}",
    "with": "with torch.no_grad():\n        x = x + 0.5\n        {s}\n        x = x * 1.5",
    "nested with": "with Noting() as k, torch.no_grad():\n        {s}\n        x = x * 1.5",
    "try": "try:\n        {s}\n        x = x * 1.5\n    except ValueError:\n        x = x * 100\n    finally:\n        n += 3",
    "finally": "try:\n        x = x * 1.5\n    finally:\n        {s}",
    "except": "try:\n        raise KeyError(5)\n    except KeyError as e:\n        {s}\n        n += e.args[0]",
    "for once": "for k in [7]:\n        {s}\n        n += k",
    "inlined": "n, x = inner(n, x)",
    "match": "match n:\n        case 1:\n            {s}\n        case _:\n            n = 50",
}  # fmt: skip


class Noting:
    def __enter__(self):
        SEEN.append("enter")
        return self

    def __exit__(self, *exc):
        SEEN.append("exit")


def made(statement, surrounding):
    """The program: ops, the statement in its surroundings, ops."""
    deep = f"def inner(n, x):\n    x = x + 0.25\n    {statement}\n    return n, x * 0.5\n"
    body = SURROUNDINGS[surrounding].format(s=statement)
    text = f"{deep}def f(x, n):\n    x = x * 2\n    {body}\n    return x + n\n"
    scope = dict(globals())
    exec(compile(text, "<program>", "exec"), scope)
    return scope["f"]


@pytest.mark.parametrize("surrounding", SURROUNDINGS)
@pytest.mark.parametrize("statement", KINDS)
def test_break(statement, surrounding):
    f = made(statement, surrounding)
    r = same_as_eager(f, X, 1, how=How(setup=SEEN.clear, state=lambda: SEEN))
    assert r.raised is None
    if EAGER:
        return
    kinds = [b.kind for b in r.found]
    assert kinds[0] == KINDS[statement] and set(kinds[1:]) <= {"foreign-iterator"}, [str(b) for b in r.found]
    # Both arms of a branch may have a graph.
    assert r.graphs in ((2, 3) if surrounding == "for once" else (2,))
    extra = {"with": 2, "nested with": 1, "try": 1, "finally": 1, "inlined": 2}.get(surrounding, 0)
    ours = [n for n in (n for gm in r.modules for n in ops_of(gm)) if "grad" not in str(n.target)]
    assert len(ours) >= 2 + extra


def in_loop(x, n):
    for i in range(n):
        x = x + i
        kiln.graph_break()
    return x * 2


def in_while(x):
    n = 0
    while n < 3:
        x = x * 2
        n += 1
        kiln.graph_break()
    return x - 1


def in_nested_loops(x):
    for i in range(2):
        for j in range(2):
            x = x + i * j
            kiln.graph_break()
    return x * 2


def in_loop_over_items(x):
    for name, k in {"a": 1, "b": 2, "c": 3}.items():
        x = x * k + len(name)
        kiln.graph_break()
    return x * 2


def in_loop_with_continue_and_break(x):
    for i in range(5):
        if i == 1:
            continue
        if i == 3:
            break
        x = x + i
        kiln.graph_break()
    else:
        x = x * 100
    return x * 2


LOOPS = {in_loop: ((X, 3), 3), in_while: ((X,), 3), in_nested_loops: ((X,), 4), in_loop_over_items: ((X,), 3),
         in_loop_with_continue_and_break: ((X,), 2)}  # fmt: skip


@pytest.mark.parametrize("f", LOOPS, ids=lambda f: f.__name__)
def test_break_in_a_loop(f):
    """At most a graph for each turn and one for the rest; a graph that serves several turns is better."""
    args, turns = LOOPS[f]
    r = same_as_eager(f, *args)
    assert r.raised is None
    if not EAGER:
        assert r.found[0].kind == "graph-break-called" and 2 <= r.graphs <= turns + 1, (r.graphs, r.found)
        assert r.runs == 2 * (turns + 1)


def test_layers_after_a_break_in_a_loop_are_one_graph():
    def f(x, layers):
        for i, layer in enumerate(layers):
            x = layer(x)
            if i == 1:
                kiln.graph_break()
        return x

    torch.manual_seed(0)
    layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(8))
    pin(same_as_eager(f, X, layers), graphs=2, breaks=1)


def test_loop_while_a_tensor_is_small():
    def f(x):
        while x.sum() < 100:
            x = x * 2
        return x + 1

    w = Watch(f)
    w(torch.ones(4))
    graphs = w.graphs
    w(torch.ones(4) * 3)
    if not EAGER:
        assert 2 <= graphs <= 3, "the loop's graph serves every turn"
        w.pin(graphs=graphs)


def test_break_in_a_comprehension_loop_body():
    def f(x):
        return [v * 2 for v in (x, x + 1) if (v.sum() > -100).item()]

    r = same_as_eager(f, X)
    assert EAGER or r.breaks >= 1


def inner3(x):
    x = x - 3
    kiln.graph_break("deep inside")
    return x - 4


def inner2(x, k):
    x = x * 2
    y = inner3(x)
    return y * k


def inner1(x):
    return inner2(x + 1, k=5) + 6


def test_break_several_calls_deep_keeps_the_callers_graphs():
    r = same_as_eager(inner1, X)
    pin(r, graphs=2, breaks=1)
    if not EAGER:
        sizes = [len(ops_of(gm)) for gm in r.modules]
        assert sizes == [3, 3], "one graph up to the break, then one for the rest of all frames"
        assert r.found[0].place.function.endswith("inner3")


def test_break_deep_inside_with_nothing_to_do_after_it():
    def leaf(x):
        kiln.graph_break()
        return x

    def middle(x):
        return leaf(x * 2)

    pin(same_as_eager(lambda x: middle(x + 1), X), graphs=1, breaks=1)


def test_break_in_a_call_inside_an_expression():
    def f(x):
        return (x + 1, [x * 2, inner3(x) * 5], {"k": x.sin()})

    pin(same_as_eager(f, X), graphs=2, breaks=1)


def test_break_in_a_call_with_state_on_the_callers_stack():
    def f(x, log):
        log.append("before")
        total = x.sum() + sum([1, 2, inner3(x).shape[0]]) * len(log)
        log.append("after")
        return total

    pin(same_as_eager(f, X, []), graphs=2, breaks=1)


def test_two_breaks_in_one_inlined_call():
    def leaf(x):
        x = x + 1
        kiln.graph_break()
        x = x * 2
        kiln.graph_break()
        return x - 3

    def f(x):
        y = leaf(x * 10)
        return y / 2

    r = same_as_eager(f, X)
    pin(r, graphs=3, breaks=2)


def test_break_in_an_inlined_method_constructor_and_property():
    class Layer:
        def __init__(self, x):
            self.w = x * 2
            kiln.graph_break()
            self.v = self.w + 1

        @property
        def total(self):
            y = self.w + self.v
            kiln.graph_break()
            return y * 2

        def run(self, x):
            kiln.graph_break()
            return x + self.w

    def f(x):
        layer = Layer(x)
        return layer.run(x * 3) + layer.total

    r = same_as_eager(f, X)
    assert EAGER or r.breaks == 3


def test_break_in_a_module_keeps_the_graphs_around_it():
    class Noisy(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = torch.nn.Linear(4, 4)

        def forward(self, x):
            x = self.lin(x)
            kiln.graph_break()
            return x.relu()

    torch.manual_seed(0)
    layers = [torch.nn.Linear(4, 4), Noisy(), torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4)]
    pin(same_as_eager(torch.nn.Sequential(*layers), G), graphs=2, breaks=1)


def test_break_in_recursion():
    def down(x, n):
        if n == 0:
            kiln.graph_break()
            return x
        return down(x + n, n - 1) * 2

    pin(same_as_eager(down, X, 2), graphs=2, breaks=1)


def test_break_in_a_deep_recursion():
    def down(x, n):
        if n == 0:
            kiln.graph_break()
            return x
        return down(x + n, n - 1) * 2

    how = How(runs=22)  # the rest of each frame is the same graph
    pin(same_as_eager(down, X, 10, how=how), graphs=3, breaks=1, how=how)


def test_loop_in_a_call_that_breaks_in_each_turn_goes_on_in_its_caller():
    def leaf(x, n):
        for i in range(n):
            x = x + i
            kiln.graph_break()
            x = x * 2
        return x

    def f(x, n):
        y = leaf(x - 1, n)
        return y / 2

    w = Watch(f)
    w(X, 20)
    graphs = w.graphs
    w(X, 20)
    w.pin(graphs=graphs)
    assert EAGER or graphs <= 6, "one for each turn would be many"


def test_break_on_both_ways_of_a_branch_in_a_call():
    def leaf(x):
        x = x + 1
        if x.sum() > 0:
            return x * 2
        return x * 3

    w = Watch(lambda x: leaf(x * 5) - 1)
    w(X)
    w(-X - 1)
    w.pin(graphs=3)


def test_call_that_handles_what_its_break_raises_gives_its_result_to_the_caller():
    def leaf(x):
        x = x + 1
        try:
            open("/no/such/file")
        except OSError:
            return x * 2
        return x * 3

    r = same_as_eager(lambda x: leaf(x * 5) - 1, X)
    pin(r, graphs=2, breaks=1)
    assert EAGER or [len(ops_of(gm)) for gm in r.modules] == [2, 1]


def test_exception_after_a_break_in_a_call_reaches_the_callers_handler():
    def leaf(x):
        kiln.graph_break()
        raise KeyError("after the break")

    def f(x):
        y = x + 1
        try:
            leaf(y)
        except KeyError as e:
            y = y * 2
            return y, e.args
        finally:
            SEEN.append("finally")

    r = same_as_eager(f, X, how=How(setup=SEEN.clear, state=lambda: SEEN))
    assert r.raised is None and (EAGER or r.breaks == 1)


def test_exception_raised_by_the_broken_instruction_is_handled():
    def f(x):
        y = x + 1
        try:
            y = y * 2
            open("/no/such/file")
            y = y * 1000
        except FileNotFoundError as e:
            y = y + e.errno
        return y

    r = same_as_eager(f, X)
    assert r.raised is None and (EAGER or (r.breaks == 1 and r.graphs in (1, 2)))


def test_with_block_sees_an_exception_after_the_break():
    log = []

    @contextlib.contextmanager
    def noting():
        log.append("enter")
        try:
            yield
        except KeyError:
            log.append("seen")
        finally:
            log.append("exit")

    def f(x):
        x = x + 1
        with noting(), torch.no_grad():
            kiln.graph_break()
            x = x * 2
            raise KeyError
        return x, torch.is_grad_enabled()

    r = same_as_eager(f, X, how=How(setup=log.clear, state=lambda: log))
    assert r.raised is None


def test_bare_raise_after_a_break_in_a_handler():
    def f(x):
        y = x + 1
        try:
            raise KeyError("first")
        except KeyError:
            y = y * 2
            kiln.graph_break()
            raise

    r = same_as_eager(f, X)
    assert type(r.raised) is KeyError


def test_closures_and_cells_across_a_break():
    def f(x):
        n = 1

        def bump(k):
            nonlocal n
            n += k
            return x * n

        a = bump(1)
        kiln.graph_break()
        b = bump(2)
        x = x + 100
        return a, b, bump(0), n

    pin(same_as_eager(f, X), graphs=2, breaks=1)


def test_values_of_every_sort_live_across_a_break():
    def f(x, d):
        a, s, n = [x, 1], {1, 2}, None
        d["new"] = a
        g = lambda v: v + len(a)  # noqa: E731
        kiln.graph_break()
        a.append(x * 2)
        return g(x) + 1, a, d["new"] is a, s, n

    pin(same_as_eager(f, X, {"k": 1}), graphs=1, breaks=1)


def test_iterators_live_across_a_break():
    def f(x):
        it, z = iter([1, 2, 3]), zip([1, 2], "ab")
        next(it), next(z)
        kiln.graph_break()
        return x + next(it), list(it), list(z)

    same_as_eager(f, X)


def test_gradients_flow_across_breaks():
    def f(x):
        y = x * 2
        kiln.graph_break()
        z = y.sin()
        kiln.graph_break()
        return (z * y).sum()

    pin(same_as_eager(f, G), graphs=3, breaks=2)


def test_in_place_changes_and_aliases_across_a_break():
    def f(x):
        v = x.view(-1)
        v.add_(1)
        kiln.graph_break()
        x.mul_(2)
        return v + 1, v

    pin(same_as_eager(f, X), graphs=2, breaks=1)


def test_random_numbers_across_a_break():
    def f(x):
        a = torch.rand(2)
        kiln.graph_break()
        return a, torch.rand(2), x + 1

    pin(same_as_eager(f, X), graphs=2, breaks=1)


def test_disabled_code_is_not_captured_inside():
    @kiln.disable
    def off(x):
        return helper(x) * 2

    def helper(x):
        return x + torch.compiler.is_compiling()

    pin(same_as_eager(lambda x: off(x + 1) + 1, X), graphs=2, breaks=1)


def test_disabled_without_recursion_captures_what_it_calls():
    def helper(x):
        return x * 2 + 1

    @kiln.disable(recursive=False)
    def off(x):
        return helper(x)

    r = same_as_eager(lambda x: off(x + 1) + 1, X)
    assert EAGER or (r.breaks, r.graphs) == (1, 3)


def test_disallowed_and_allowed_functions():
    def mine(x):
        return x * 2

    kiln.disallow_in_graph(torch.sinh)
    try:
        pin(same_as_eager(lambda x: torch.sinh(x + 1) * 2, X), graphs=2, breaks=1)
    finally:
        kiln.allow_in_graph(torch.sinh)
    kiln.allow_in_graph(mine)
    r = same_as_eager(lambda x: mine(x) + 1, X)
    pin(r)
    assert EAGER or any(n.target is mine for n in r.modules[0].graph.nodes)


def test_constant_result_is_taken_once():
    calls = []

    @kiln.assume_constant_result
    def setting():
        calls.append(1)
        return 3

    w = kiln.compile(lambda x: x * setting(), backend="eager")
    torch.testing.assert_close(w(X), X * 3)
    torch.testing.assert_close(w(X), X * 3)
    assert EAGER or len(calls) == 1


def test_logging_and_disabled_loggers_do_not_hide_a_break():
    log = logging.getLogger("breaks")

    def f(x):
        y = x + 1
        log.debug("nothing %s", y.shape)
        return y * 2

    pin(same_as_eager(f, X))


def test_generator_that_breaks_gives_eager_results():
    def rows(x):
        for i in range(2):
            kiln.graph_break()
            yield x + i

    same_as_eager(lambda x: [v * 2 for v in rows(x)], X)


def test_unsupported_frames_are_left_alone():
    async def co(x):
        return x + 1

    def gen(x):
        yield x + 1
        yield x + 2

    def drive(x):
        try:
            co(x).send(None)
        except StopIteration as stop:
            return stop.value

    same_as_eager(drive, X)
    same_as_eager(gen, X)
    same_as_eager(lambda x: (sorted(locals()), x + 1), X)
    same_as_eager(lambda x: eval("x + 1"), X)


def test_the_rest_is_captured_when_it_first_runs():
    def f(x, flag):
        y = x + 1
        kiln.graph_break()
        return y * 2 if flag else y * 3

    w = Watch(f)
    w(X, True)
    w.pin(graphs=2)
    w(X, False)
    if not EAGER:
        assert len(w.backend.modules) in (3, 4)


# What a break says.


def refusal(f, *args):
    with pytest.raises(Break) as info:
        kiln.compile(f, backend="eager", fullgraph=True)(*args)
    return info.value


@needs_kiln
@pytest.mark.parametrize("statement", [s for s in KINDS if not any(part in s for part in ("disabled", ".item()", ".tolist()", "int("))])
def test_full_graph_raises_the_break(statement):
    error = refusal(made(statement, "plain"), X, 1)
    assert error.kind == KINDS[statement]
    assert re.fullmatch(r"[a-z]+(-[a-z]+)*", error.kind)
    assert error.at.file == "<program>" and error.at.function.endswith("f") and error.at.line == 7
    assert error.why and error.hint
    assert str(error) == f"graph break [{error.kind}] at {error.at}: {error.why}; {error.hint}"


TEXTS = {
    "branch-on-tensor": ("if x.sum() > 0:", "the condition is the value of a tensor", "torch.where"),
    "data-dependent": ("y = len(str(x.sum().item()))", "item", "keep it a tensor"),
    "io": ("print(x.shape)", "input or output happens here", "move it out of the compiled function"),
    "graph-break-called": ('kiln.graph_break("on purpose")', "on purpose", "remove the call of graph_break"),
    "disabled": ("disabled(x)", "disabled is disabled for compilation", "remove kiln.disable"),
    "native-call": ("time.sleep(0)", "time.sleep is native code that is not known to be free of side effects", ""),
}


def text_branch(x):
    if x.sum() > 0:
        return x
    return -x


def text_item(x):
    y = len(str(x.sum().item()))
    return x + y


def text_io(x):
    print(x.shape)
    return x + 1


def text_called(x):
    kiln.graph_break("on purpose")
    return x + 1


def text_disabled(x):
    disabled(x)
    return x + 1


def text_native(x):
    time.sleep(0)
    return x + 1


@needs_kiln
@pytest.mark.parametrize(("kind", "f"), list(zip(TEXTS, [text_branch, text_item, text_io, text_called, text_disabled, text_native])))
def test_text_of_the_refusal(kind, f):
    line, why, hint = TEXTS[kind]
    error = refusal(f, X)
    assert error.kind == kind and error.at.text.strip() == line and why in error.why and hint in error.hint
    assert error.at.file == __file__ and error.at.function.endswith(f.__name__)
    assert f"{__file__}:{error.at.line} in " in str(error)


@needs_kiln
def test_place_of_a_break_in_an_inlined_call_is_the_inner_line():
    error = refusal(inner1, X)
    assert error.at.function.endswith("inner3") and 'graph_break("deep inside")' in error.at.text


@needs_kiln
def test_record_says_what_the_error_says():
    r = same_as_eager(text_branch, X)
    error, record = refusal(text_branch, X), r.found[0]
    assert (record.kind, record.place, record.why, record.hint) == (error.kind, error.at, error.why, error.hint)
    assert record.region.endswith("text_branch")


@needs_kiln
def test_full_graph_leaves_errors_of_the_program_alone():
    def f(x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        kiln.compile(f, backend="eager", fullgraph=True)(X)


@needs_kiln
def test_capture_refuses_a_broken_graph():
    with pytest.raises(Break):
        kiln.capture(field, X, X)
    assert len(list(kiln.capture(lambda x: x + 1, X).graph_module.graph.nodes)) == 3


@needs_kiln
def test_graphs_have_names_and_stack_traces():
    backend = Counting()
    kiln.compile(inner2, backend=backend)(X, 5)
    node = ops_of(backend.modules[0])[0]
    assert re.search(rf'File "{re.escape(__file__)}", line \d+, in inner2', node.meta["stack_trace"])
    assert {n.op for gm in backend.modules for n in gm.graph.nodes} <= {
        "placeholder", "get_attr", "call_function", "call_method", "call_module", "output"}  # fmt: skip
