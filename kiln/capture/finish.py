"""The end of a capture: graph, guards, and residual code that calls the graph and goes on after a break."""

from __future__ import annotations

import functools
import types
from collections import Counter
from collections.abc import Callable, Iterator
from inspect import CO_NEWLOCALS, CO_OPTIMIZED
from typing import Any

import torch
from torch.autograd.graph import increment_version

from kiln import _hook
from kiln.base import state
from kiln.base.dataclass import dataclass
from kiln.base.errors import Break
from kiln.base.reports import words_of
from kiln.base.source import Source
from kiln.bytecode import decompile
from kiln.bytecode.assemble import Emitter, Label
from kiln.capture import expected, nested, runtime
from kiln.capture.frame import Frame, Replaced, Restart
from kiln.capture.machine import Machine
from kiln.capture.onward import Resumption
from kiln.capture.rebuild import Raw, Rebuilder
from kiln.capture.spent import history, is_spent
from kiln.capture.streams import stream_writes
from kiln.capture.world import MISSING, Overlay
from kiln.ops.fake import FakeTensor

Compiler = Callable[[torch.fx.GraphModule, list[Any]], Callable[..., Any]]


@dataclass(slots=True)
class Captured:
    """What one capture gives: guards, graph (None without a torch call) and the code that runs instead."""

    guards: Any
    graph: torch.fx.GraphModule | None
    ops: int
    inputs: int
    run: types.FunctionType
    code: types.CodeType
    continued: tuple[types.CodeType, ...]  # the code that goes on after a break, outermost frame first
    reason: Break | None
    end: tuple[Any, int]  # the code and the instruction at which it ended
    foreseen: runtime.Foreseen
    looped: bool = False  # whether what goes on after the break comes back to it


class Finisher:
    """Turns the state of a machine, at a return or at a break, into a function of the frame's arguments."""

    def __init__(self, machine: Machine, root: Frame, names: tuple[str, ...], before: tuple[Any, ...],
                 compiler: Compiler, resume: Callable[[types.FunctionType], Any], cache: dict[Any, Any],
                 in_python: Callable[[Any], Any] = lambda target: target) -> None:  # fmt: skip
        self.m, self.root, self.names, self.before = machine, root, names, before
        self.compiler, self.resume, self.cache, self.in_python = compiler, resume, cache, in_python
        self.after = state.snapshot()
        self.graph: torch.fx.GraphModule | None = None
        self.ops = self.inputs = 0
        self.exchanged: set[Source] = set()  # paths of inputs whose data is kept for backward passes
        self.unseen: set[int] = set()  # ids of tensors made here that only this capture knows of
        self.foreseen = runtime.Foreseen(machine.foreseen, cache.setdefault("failures", Counter()))

    def finish(self, tail: Callable[[Rebuilder], None], reason: Break | None) -> Captured:
        """Emit graph call, rebuilt values, writes and the tail."""
        if self.m.expected and not self.replays():
            self.refuse_late()
        dry = self.dry(tail)
        for chosen in self.m.chosen:
            if not chosen.serves(self.m, dry.outputs):
                # The program would see a new tensor where it has a number, or one of two tensors.
                raise Restart(chosen.step, expected.refusal())
        self.keep_exchanged(dry.outputs)
        self.m.world.varying.settle()
        call, inputs = self.compile_graph(dry.outputs, self.after if reason is None else None)
        e = Emitter()
        e.raw("RESUME", 0)
        if self.writes_early() and (self.writes() or self.m.late or self.root.code.code.co_exceptiontable):
            self.in_frame(e)
            e.ret()
        else:
            self.through_graph(e, dry, tail, call, inputs)
        name = self.root.code.code.co_name
        built = e.finish(f"<{name} captured>", decompile.generated_name(name), 1, len(self.names),
                         self.names, CO_OPTIMIZED | CO_NEWLOCALS, statements=True)  # fmt: skip
        _hook.skip(built)
        _hook.hide(built, _hook.INNER)
        run = types.FunctionType(built, self.root.globals)
        decompile.show(run)
        counts, last = (self.ops, self.inputs), (self.root.code, self.root.index)
        return Captured(None, self.graph, *counts, run, built, (), reason, last, self.foreseen)

    def keep_exchanged(self, outputs: list[FakeTensor]) -> None:
        """Have the graph read data that is exchanged through tensors that keep it for backward passes.

        Where gradients follow from such a tensor itself, capture begins again for a break.
        """
        spent = self.m.recorder.spent
        going_on = [out for out in outputs if out.requires_grad and not is_spent(spent, out)]
        if not going_on or not self.m.exchanged:
            return
        leaves = {id(getattr(node, "variable", None)) for node in history(going_on)}
        for step, fake in self.m.exchanged:
            if id(fake) in leaves or any(fake is out for out in going_on):
                why = "data of a tensor is assigned that gradients may follow from"
                raise Restart(step, Break("metadata-mutation", why, "use copy_ under torch.no_grad()"))
        sources = {source for _, fake in self.m.exchanged if (source := self.m.source(fake)) is not None}
        owned = frozenset(str(source) for source in sources if self.m.world.owned(source))
        if owned - self.m.world.unstable:
            raise Replaced(owned)
        self.exchanged = sources

    def refuse_late(self) -> None:
        """Begin again where the graph checks something and may have written by then."""
        first = self.may_replay() and self.on_cpu()  # whether checks of branches come before writes
        for step, reason, said in self.m.expected:
            if not (first and said):
                raise Restart(step, reason)

    def dry(self, tail: Callable[[Rebuilder], None]) -> Rebuilder:
        """The code emitted for what it needs; what is written to tensors made here that nobody sees goes."""
        world = self.m.world
        owners = [overlay.owner for overlay in world.instance.values()]
        self.unseen = {id(t) for t in owners if isinstance(t, FakeTensor) and world.source(t) is None}
        while True:
            dry = Rebuilder(world, Emitter(), self.m.steps)
            self.body(dry, tail)
            seen = {key for key in self.unseen if dry.uses[key]}
            if not seen:
                return dry
            self.unseen -= seen

    def through_graph(
        self, e: Emitter, dry: Rebuilder, tail: Callable[[Rebuilder], None], call: Any, inputs: list[Any]
    ) -> None:
        """Call the graph and do what is left to do."""
        r = Rebuilder(self.m.world, e, self.m.steps, dry)
        if call is not None and self.goes_back():
            e.callee(functools.partial(runtime.generator_states, tuple(self.m.recorder.dispatch.draws)))
            e.end_call(0)
            e.store("__drawn")
        for draw in self.m.world.varying.draws.values():
            r.draw(draw)
        if call is not None and self.m.world.cleared:
            self.clear(r, dry, inputs)
        start = e.here()
        if call is not None:
            e.callee(call)
            for info in inputs:
                if info.source in self.exchanged:
                    e.callee(runtime.keeping_data)
                r.source(info.source)
                if info.source in self.exchanged:
                    e.end_call(1)
            e.end_call(len(inputs))
            end = e.here()
            e.store("__out")
        self.body(r, tail)
        e.ret()
        if call is not None:
            self.raised(e, start, end)

    def clear(self, r: Rebuilder, dry: Rebuilder, inputs: list[Any]) -> None:
        """Let gradients go before the graph runs that the program clears and does not use: others come."""
        used, owners = {id(info.real) for info in inputs}, []
        for key, owner in self.m.world.cleared.items():
            old = self.m.world.reals[key].grad
            fake = None if old is None else self.m.recorder.fakes.get(id(old))
            if old is not None and id(old) not in used and not (fake is not None and dry.uses[id(fake)]):
                owners.append(owner)
        if owners:
            r.then(runtime.clear_gradients, *owners)

    def in_frame(self, e: Emitter) -> None:
        """Run the frame in Python."""
        e.callee(nested.again(self.root.function, self.before))
        for name in self.names:
            e.load(name)
        e.end_call(len(self.names))

    def writes_early(self) -> bool:
        """Whether the graph runs op by op and may have written to tensors when it raises.

        Then only the frame itself leaves other effects as far as it came, and only its handlers see it.
        """
        as_captured = self.graph is not None and "as captured" in self.graph.meta
        return as_captured and self.m.recorder.dispatch.lasting

    def replays(self) -> bool:
        """Whether the graph changes nothing that lasts: when it raises, the frame may run again in Python."""
        return self.may_replay() and not self.m.recorder.dispatch.lasting

    def may_replay(self) -> bool:
        """The same where it raises before it writes to tensors, which the one who runs it tells."""
        lasting = any(draw.lasting for draw in self.m.world.varying.draws.values())
        return is_replayed(self.m.recorder.graph) and not lasting

    def goes_back(self) -> bool:
        """Whether random numbers are drawn again in Python where the graph raises, as it may."""
        dispatch, nodes = self.m.recorder.dispatch, self.m.recorder.graph.nodes
        checks = any(node.op == "call_function" and module_of(node.target) in CHECKING for node in nodes)
        sure = dispatch.sure and not checks and not self.m.world.varying.draws
        return bool(dispatch.draws) and not sure and self.may_replay()

    def on_cpu(self) -> bool:
        """Whether all that the graph may write to is on the CPU, where checks come before writes."""
        return all(fake.device.type == "cpu" for fake in self.m.recorder.fakes.values())

    def raised(self, e: Emitter, start: Label, end: Label) -> None:
        """What is done when an op raises at run time, between the two places."""
        handler, written = Label(), Label()
        e.protect(start, end, handler, 0)
        e.place(handler)
        e.raw("PUSH_EXC_INFO")
        if self.may_replay():
            if not self.replays():
                checks = tuple(said for _, _, said in self.m.expected if said not in self.m.late)
                self.hand_over(e, functools.partial(runtime.wrote_nothing, checks))
                e.jump_on("POP_JUMP_IF_FALSE", written)
            self.replay(e)
        if not self.replays():
            e.place(written)
            self.retell(e)

    def hand_over(self, e: Emitter, function: Any) -> None:
        """Call a function with the exception that was raised."""
        e.callee(function)
        e.copy(3)
        e.end_call(1)

    def replay(self, e: Emitter) -> None:
        """Run the frame in Python, where its handlers see the exception."""
        self.hand_over(e, words_of)
        e.store("__raised")
        e.pop()
        e.raw("POP_EXCEPT")
        if self.goes_back():
            e.callee(runtime.set_generators)
            e.load("__drawn")
            e.end_call(1)
            e.pop()
        self.in_frame(e)
        e.callee(functools.partial(runtime.ran_in_python, self.root.function.__qualname__, self.foreseen))
        e.load("__raised")
        e.end_call(1)
        e.pop()
        e.ret()

    def retell(self, e: Emitter) -> None:
        """Raise it with a traceback that shows the line of the program that the op stands on."""
        assert self.graph is not None
        places = {node.name: node.meta.get("stack_trace", "") for node in self.graph.graph.nodes}
        self.hand_over(e, functools.partial(runtime.retell, places))
        e.pop()
        e.swap(2)
        e.raw("POP_EXCEPT")
        e.raw("RERAISE", 0)

    def compile_graph(self, outputs: list[FakeTensor], left: tuple[Any, ...] | None) -> tuple[Any, list[Any]]:
        graph, inputs = self.m.recorder.finish(outputs)
        calls = [n for n in graph.graph.nodes if n.op.startswith("call")]
        if not outputs and all(n.target in SWITCHED for n in calls):
            return None, []
        self.graph, self.ops, self.inputs = graph, len(calls), len(inputs)
        call = self.compiler(graph, [info.real for info in inputs])
        if any(n.target in EFFECTS for n in calls):
            call = state.guarded(call, left)
        lent = [*self.m.recorder.lent.values()]
        if lent:
            call = runtime.lending(call, [own for own, _ in lent])
        return call, [*inputs, *[info for _, info in lent]]

    def body(self, r: Rebuilder, tail: Callable[[Rebuilder], None]) -> None:
        """Values first, while every path still leads to what capture saw; then the writes; then the tail."""
        writes, switches = self.writes(), state.difference(self.before, self.after)
        switches += [(torch.device.__enter__, device) for device in self.m.devices]
        if not writes and not switches:
            tail(r)
            return
        for _, values in writes:
            for value in values:
                r.prepare(value)
        tail(Preparing(r))  # type: ignore[arg-type]
        for function, values in (*writes, *((write, (value,)) for write, value in switches)):
            r.call(function, *values)
            r.e.pop()
        tail(r)

    def writes(self) -> list[tuple[Any, tuple[Any, ...]]]:
        """Calls that bring the outside world to the state that capture left."""
        world = self.m.world
        calls = stream_writes(world)
        for shadow in list(world.shadows.values()):
            if shadow.full:
                calls += shadow_writes(shadow)
            elif shadow.written:
                changed = {key: item for key, item in shadow.items.items() if key in shadow.written}
                calls.append((runtime.write_dict, (shadow.copy, changed, ())))
            elif shadow.appended:
                calls.append((type(shadow.real).extend, (shadow.copy, shadow.appended)))
            calls += runtime.attribute_writes(shadow)
        for overlay in world.instance.values():
            if id(overlay.owner) in self.unseen:
                continue
            write = setattr if isinstance(overlay.owner, FakeTensor) else runtime.write_attribute
            calls += overlay_writes(overlay.owner, overlay, write, runtime.delete_attribute)
            if id(overlay.owner) in self.m.recorder.exchanged:
                count = overlay.owner._version - self.m.recorder.exchanged[id(overlay.owner)]
                calls += [(increment_version, (overlay.owner,))] * count
        for overlay in world.spaces.values():
            calls += overlay_writes(Raw(overlay.owner), overlay, dict.__setitem__, runtime.delete_item)
        for overlay in world.cells.values():
            calls += overlay_writes(overlay.owner, overlay, setattr, delattr)
        return calls

    # ------------------------------------------------------------------ tails

    def returned(self, value: Any) -> Captured:
        return self.finish(lambda r: r.push(value), None)

    def broken(self, frames: list[Frame], reason: Break) -> Captured:
        """Residual code that rebuilds every inlined frame and runs the breaking instruction in Python."""
        if len(frames) > MAX_DEPTH:
            raise Restart(frames[MAX_DEPTH].step, reason)
        for frame in frames[1:]:
            if frame.mode == "opaque" or frame.code.code.co_flags & 0x2A0:
                raise Restart(self.m.safe_step(frames), reason)
        resumption = Resumption(self.cache, self.resume, reason.kind == "stopped")
        onward = resumption.onward(frames)
        entry = onward.function if reason.kind in QUIET else self.in_python(onward.function)

        def tail(r: Rebuilder) -> None:
            r.e.callee(_hook.later)
            r.e.const(entry)
            r.e.end_call(1 + onward.push(r))

        captured = self.finish(tail, reason)
        captured.continued, captured.looped = tuple(resumption.codes), onward.again
        return captured


class Preparing:
    """Looks like a Rebuilder; pushes become preparations and nothing else is emitted."""

    def __init__(self, inner: Rebuilder) -> None:
        self.inner, self.e = inner, Silent()

    def push(self, value: Any) -> None:
        self.inner.prepare(value)

    def source(self, source: Any) -> None:
        return None


class Silent:
    """An emitter that emits nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args: None


#: Breaks behind which there is no Python code to capture.
QUIET = frozenset({"branch-on-tensor", "data-dependent", "io", "raises", "graph-break-called", "disabled",
                   "numpy", "stopped"})  # fmt: skip
MAX_DEPTH = 150  # frames that residual code takes up again one inside the other
#: Calls that do nothing but flip switches which residual code sets anyway.
SWITCHED = frozenset({torch._C._set_grad_enabled, torch.set_autocast_enabled, torch.set_autocast_dtype,
                      torch.set_autocast_cache_enabled})  # fmt: skip
EFFECTS = frozenset({torch.set_autocast_enabled, *(write for _, write in state.SWITCHES)})
#: Packages whose functions may raise for numbers.
CHECKING = frozenset({"builtins", "math", "numpy"})
#: Packages whose functions change nothing that lasts.
REPLAYED = frozenset({"torch", "_operator", "operator", "builtins", "math", "numpy"})


def is_replayed(graph: torch.fx.Graph) -> bool:
    """Whether all that a graph calls, in graphs of functions given to calls too, only computes."""
    functions = [node.target for node in graph.nodes if node.op == "call_function"]
    bodies = [body.graph.graph for f in functions for body in getattr(f, "bodies", ())]
    return all(module_of(f) in REPLAYED for f in functions) and all(map(is_replayed, bodies))


def module_of(target: Any) -> str:
    """The package that a graph's function comes from; custom autograd functions compute, as torch's do."""
    if isinstance(getattr(target, "owner", None), type) and issubclass(target.owner, torch.autograd.Function):
        return "torch"
    module = getattr(target, "__module__", None) or type(target).__module__
    if module in ("captured.builtins", "captured.func"):  # a check; a transform
        return "builtins"
    if target is runtime.seed_generator:  # one that the graph makes
        return "torch"
    return "" if target is torch.manual_seed else str(module).partition(".")[0]


def overlay_writes(owner: Any, overlay: Overlay, write: Any, delete: Any) -> Iterator[Any]:
    """How the named slots of an object are brought up to date."""
    for name, value in overlay.writes.items():
        yield (delete, (owner, name)) if value is MISSING else (write, (owner, name, value))


def shadow_writes(shadow: Any) -> list[tuple[Any, tuple[Any, ...]]]:
    """How a changed container is brought up to date."""
    if not shadow.changed():
        return []
    copy, now, before = shadow.copy, shadow.now(), shadow.before
    if not isinstance(now, dict):
        return [(runtime.rewrite, (copy, now))]
    deleted = tuple(k for k in before if k not in now)
    changed = {k: v for k, v in now.items() if k not in before or before[k] is not v}
    natural = [k for k in before if k in now] + [k for k in now if k not in before]
    if natural == list(now):
        return [(runtime.write_dict, (copy, changed, deleted))]
    return [(runtime.rewrite, (copy, dict(now)))]
