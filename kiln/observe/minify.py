"""Minify: a program that Kiln fails on, or computes wrongly, as a small script that still shows it."""

from __future__ import annotations

import copy
import inspect
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from kiln.base.dataclass import dataclass
from kiln.base.errors import KilnError
from kiln.base.log import warn
from kiln.base.options import config
from kiln.observe.programs import SAME, Outcome, Program, apart, inputs, judged, script

TRIES = 400
"""How many smaller programs are tried at most."""

Compile = Callable[..., Any]


@dataclass(frozen=True)
class Minified:
    """A script that shows a fault: its text and file, what goes wrong, and how many ops are left of how many.

    `confirmed` says whether the script, run on its own, fails. `calls` is 0 where the fault is in capture:
    then the script holds the program's own source.
    """

    text: str
    path: Path
    outcome: Outcome
    calls: int
    of: int
    confirmed: bool

    def __str__(self) -> str:
        what = f"{self.outcome.kind}: {self.outcome.detail.splitlines()[0] if self.outcome.detail else ''}"
        size = f"{self.calls} of {self.of} ops" if self.calls else "the whole function"
        shown = "" if self.confirmed else "; on its own the script does not fail"
        return f"{self.path}: {size}; {what}{shown}"


def minify(
    f: Any, args: Sequence[Any], arguments: Mapping[str, Any], path: Any, compile: Compile
) -> Minified:
    """Reduce `compile(f, **arguments)(*args)`, which fails or differs from eager, and write the script."""
    warm(arguments)
    given = apart(lambda: tried(f, args, arguments, compile))
    if given == SAME:
        raise KilnError("nothing to reduce: compiled and eager agree on these arguments")
    if given.kind == "eager":
        raise KilnError(f"nothing to reduce: the program fails in eager, too: {given.detail}")
    target = Path("kiln_report.py" if path is None else path)
    fates = ((program, fate(program, arguments)) for program in captured(f, args, compile))
    found = next((one for one in fates if one[1].kind not in ("same", "eager")), None)
    if found is None:
        text, calls, of, outcome = whole(f, args, arguments), 0, 0, given
    else:
        program, outcome = found
        small = Reducer(outcome, arguments).reduce(program)
        text, calls, of = scripted(small, arguments), len(small.calls), len(program.calls)
    target.write_text(f'"""{outcome.kind}: {plain(outcome.detail)}"""\n\n{text}')
    return Minified(text, target, outcome, calls, of, fails(target))


WARM = ("def f(x):\n    return x + 1\n", "def inputs():\n    return [torch.ones(2, requires_grad=True)]\n")


def warm(arguments: Mapping[str, Any]) -> None:
    """Load what compiling needs, so that copies of this process have it."""
    names = {"eager", arguments.get("backend", "kiln")}
    for backend in sorted(name for name in names if isinstance(name, str)):
        judged(script(WARM, True, {"backend": backend}))


def plain(text: str) -> str:
    """Text for a docstring."""
    return text.replace("\\", "/").replace('"""', "'''").strip()


def fails(path: Path) -> bool:
    """Whether a script, run on its own, ends with an error."""
    paths = [str(Path(__file__).parents[2]), *filter(None, sys.path)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run([sys.executable, str(path)], env=env, capture_output=True, check=False)
    return done.returncode != 0


# The program as it is


def tried(f: Any, args: Sequence[Any], arguments: Mapping[str, Any], compile: Compile) -> Outcome:
    """What becomes of the whole program."""
    results = []
    for way in ("eager", "compiled"):
        torch.manual_seed(0)
        mine, values = copy.deepcopy((f, list(args)))
        try:
            function = compile(mine, **arguments) if way == "compiled" else mine
            with config.patch(strict=True):
                results.append(flat(function(*values)))
        except Exception as error:
            return Outcome("raises" if way == "compiled" else way, f"{type(error).__name__}: {error}")
    return compared(results[1], results[0])


def flat(value: Any) -> list[torch.Tensor]:
    return [leaf.detach() for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def compared(got: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> Outcome:
    try:
        for mine, theirs in zip(got, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4, equal_nan=True)
    except (AssertionError, ValueError) as error:
        return Outcome("differs", str(error))
    return SAME


def captured(f: Any, args: Sequence[Any], compile: Compile) -> list[Program]:
    """The graphs of the program with the values that they are given; none where capture itself fails."""
    found: list[Program] = []

    def keep(graph: fx.GraphModule, examples: list[Any]) -> Any:
        def run(*values: Any) -> Any:
            found.append(program_of(graph, values))
            return graph.forward(*values)

        return run

    torch.manual_seed(0)
    try:
        compile(f, backend=keep)(*copy.deepcopy(list(args)))
    except Exception as error:
        warn(f"capture ends with {type(error).__name__}: {error}")
    return found


def program_of(module: fx.GraphModule, values: Sequence[Any]) -> Program:
    """A captured graph with the tensors that it holds as further inputs."""
    graph, given = fx.Graph(), list(map(kept, values))
    places: dict[fx.Node, fx.Node] = {}
    held = [node for node in module.graph.nodes if node.op == "get_attr"]
    for node in (*[n for n in module.graph.nodes if n.op == "placeholder"], *held):
        places[node] = graph.placeholder(node.name)
    given += [kept(attrgetter(str(node.target))(module)) for node in held]
    for node in module.graph.nodes:
        if node not in places:
            places[node] = graph.node_copy(node, places.__getitem__)
            places[node].meta = {}
    return Program(graph, tuple(given), torch.is_grad_enabled())


def kept(value: Any) -> Any:
    """A copy of a value, apart from the program's."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    return value


def scripted(program: Program, arguments: Mapping[str, Any]) -> str:
    return script([program.text()], program.grad, arguments)


def fate(program: Program, arguments: Mapping[str, Any]) -> Outcome:
    """What becomes of a program's script, in a process of its own."""
    try:
        text = scripted(program, arguments)
    except ValueError as error:
        return Outcome("eager", str(error))
    return apart(lambda: judged(text))


def whole(f: Any, args: Sequence[Any], arguments: Mapping[str, Any]) -> str:
    """A script with the source of the function itself."""
    owner = type(f) if isinstance(f, torch.nn.Module) else f
    try:
        source = textwrap.dedent(inspect.getsource(owner))
    except (OSError, TypeError):
        source = f"# The source of {owner!r} is not known."
    name = getattr(owner, "__name__", "f")
    alias = "" if name == "f" else f"\nf = {name}\n"
    if isinstance(f, torch.nn.Module):
        alias = f"\nf = {name}()  # with the arguments that the program gives\n"
    return script([source + alias, inputs(args)], torch.is_grad_enabled(), arguments)


# Reduction


class Reducer:
    """Looks for smaller programs that fail in the same way."""

    def __init__(self, outcome: Outcome, arguments: Mapping[str, Any]) -> None:
        self.outcome, self.arguments, self.left = outcome, arguments, TRIES

    def fails(self, program: Program) -> bool:
        if self.left <= 0 or not program.calls:
            return False
        self.left -= 1
        return fate(program, self.arguments).like(self.outcome)

    def reduce(self, program: Program) -> Program:
        """The smallest program that is found."""
        before = None
        while before is None or len(program.calls) < before:
            before = len(program.calls)
            program = self.first(program, earlier_outputs)
            program = self.fewer_calls(program)
        for smaller in (smaller_shapes, simpler_inputs):
            program = self.all(program, smaller)
        return program

    def first(self, program: Program, smaller: Callable[[Program], Iterator[Program]]) -> Program:
        """The first of some smaller programs that fails, or the program itself."""
        return next((candidate for candidate in smaller(program) if self.fails(candidate)), program)

    def all(self, program: Program, smaller: Callable[[Program], Iterator[Program]]) -> Program:
        """The program made smaller as long as that fails, too."""
        while self.left > 0:
            found = self.first(program, smaller)
            if found is program:
                break
            program = found
        return program

    def fewer_calls(self, program: Program) -> Program:
        """Give what stretches of calls compute as inputs: halves first, single calls last."""
        size = max(len(program.calls) // 2, 1)
        while size:
            at = 0
            while at < len(program.calls):
                candidate = given_values(program, at, at + size)
                if len(candidate.calls) < len(program.calls) and self.fails(candidate):
                    program = candidate
                else:
                    at += size
            size //= 2
        return program


def earlier_outputs(program: Program) -> Iterator[Program]:
    """The program with one value as its output: values in halves of the way, then single outputs."""
    calls = program.calls
    places = [len(calls) * k // 8 for k in range(1, 8)] if len(calls) > 8 else range(len(calls) - 1)
    outputs = program.graph.output_node().all_input_nodes
    names = [*[calls[i].name for i in places], *[node.name for node in outputs if len(outputs) > 1]]
    for name in names:
        graph = copy.deepcopy(program.graph)
        node = next(n for n in graph.nodes if n.name == name)
        graph.output_node().args = ((node,),)
        yield program.with_graph(graph, program.inputs)


def given_values(program: Program, start: int, end: int) -> Program:
    """The program with the values of some calls as inputs; the program where one is no tensor or number."""
    values = values_of(program)
    names = [node.name for node in program.calls[start:end]]
    graph, inputs = copy.deepcopy(program.graph), list(program.inputs)
    last = [node for node in graph.nodes if node.op == "placeholder"]
    for node in [n for n in graph.nodes if n.name in names]:
        value = values.get(node.name)
        if not isinstance(value, (torch.Tensor, int, float)):
            return program
        with graph.inserting_after(last[-1]) if last else graph.inserting_before(next(iter(graph.nodes))):
            given = graph.placeholder(f"given_{len(inputs)}")
        last.append(given)
        node.replace_all_uses_with(given)
        inputs.append(value)
    return program.with_graph(graph, inputs)


def values_of(program: Program) -> dict[str, Any]:
    """What the calls of a program compute in eager."""
    found: dict[str, Any] = {}

    class Keeping(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            result = super().run_node(n)
            found[n.name] = kept(result)
            return result

    torch.manual_seed(0)
    inputs = [v.detach() if isinstance(v, torch.Tensor) else v for v in map(kept, program.inputs)]
    with torch.set_grad_enabled(program.grad):
        Keeping(fx.GraphModule(torch.nn.Module(), copy.deepcopy(program.graph))).run(*inputs)
    needs = any(isinstance(v, torch.Tensor) and v.requires_grad for v in program.inputs)
    return {name: grown(value, needs and program.grad) for name, value in found.items()}


def grown(value: Any, grad: bool) -> Any:
    """A value that requires grad where values of its kind do."""
    if grad and isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex()):
        return value.requires_grad_()
    return value


def smaller_shapes(program: Program) -> Iterator[Program]:
    """The program with one size of its inputs replaced by a smaller one, wherever that number stands."""
    tensors = [value for value in program.inputs if isinstance(value, torch.Tensor)]
    for size in sorted({n for tensor in tensors for n in tensor.shape if n > 1}, reverse=True):
        for new in dict.fromkeys((1, 2, size // 2)):
            if new >= size:
                continue
            graph = copy.deepcopy(program.graph)
            for node in graph.nodes:
                if node.op.startswith("call"):
                    node.args = fx.node.map_aggregate(node.args, partial(resized, size=size, new=new))
            yield replace(program, graph=graph, inputs=tuple(resized(v, size, new) for v in program.inputs))


def resized(value: Any, size: int, new: int) -> Any:
    if type(value) is int and value == size:
        return new
    if not isinstance(value, torch.Tensor) or size not in value.shape:
        return value
    made = value.detach()
    for dim, n in enumerate(value.shape):
        if n == size:
            made = made.narrow(dim, 0, new)
    return made.clone().requires_grad_(value.requires_grad)


def simpler_inputs(program: Program) -> Iterator[Program]:
    """The program without gradients, then with one input of ones."""
    for i, value in enumerate(program.inputs):
        if not isinstance(value, torch.Tensor):
            continue
        simple = [value.detach().clone()] if value.requires_grad else []
        if value.is_floating_point() and value.numel() and not bool((value == 1).all()):
            simple.append(torch.ones_like(value).requires_grad_(value.requires_grad))
        for new in simple:
            yield replace(program, inputs=(*program.inputs[:i], new, *program.inputs[i + 1 :]))
