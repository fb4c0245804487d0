"""Telling: the records and warnings that a capture, a recompile or an internal error leaves."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from types import CodeType, FunctionType
from typing import Any

import torch

from kiln.base import log, records
from kiln.base.errors import Place
from kiln.base.places import is_library, places_of
from kiln.base.records import Failure
from kiln.base.reports import fell_back
from kiln.bytecode.decode import decode
from kiln.bytecode.decompile import beside, source_of
from kiln.capture.finish import Captured
from kiln.capture.frame import place_at
from kiln.capture.runtime import Within
from kiln.capture.told import operations
from kiln.capture.variables import INSIDE
from kiln.check.guards import sentence

OFTEN = 3
"""Recompiles for one reason before it is said aloud."""
UNFIX = "compile without dynamic=False, so that a size that varies is symbolic"
STACK = "__stack"
STACKED = re.compile(rf"{STACK}\d+")
CARRIED = "a value from before the break"
ASKED_FOR = frozenset({"graph-break-called", "disabled", "disallowed", "stopped", "capture-raised"})
"""Kinds of breaks that a program asks for."""


def captured_frame(
    function: FunctionType, captured: Captured, entry: Any, made: str, name: str, argv: Sequence[Any]
) -> None:
    """A frame was captured: its graph, its break and the code that runs instead."""
    heard = records.heard()
    if captured.graph is not None:
        records.emit(
            graph_record(function, captured, entry, made, name)
            if heard or log.wants("graph")
            else records.GraphRecord(made, None, captured.ops, captured.inputs, defined(function, argv), name)
        )
        if log.wants("guards"):
            log.say("guards", "\n  ".join([made, *map(sentence, entry.guards)]))
    reason = captured.reason
    if reason is not None and reason.kind != "raises":
        records.emit(records.BreakRecord(reason.kind, reason.at, reason.why, reason.hint, name, made))
        if captured.looped and reason.kind not in ASKED_FOR:
            key = "loop", reason.at and (reason.at.file, reason.at.line)
            log.warn_once(key, f"a loop leaves the graph in every turn: {reason}")
    if heard or log.wants("code"):
        residual(function, captured, made, name, argv)


def graph_record(
    function: FunctionType, captured: Captured, entry: Any, made: str, name: str
) -> records.GraphRecord:
    """The record of a captured graph; its ops and guards one by one where somebody listens."""
    assert captured.graph is not None
    listening = records.listening()
    all_ops = operations(captured.graph) if listening else ()
    guards = entry.guards if listening else ()
    guarded = tuple([(sentence(guard), entry.place(guard)) for guard in guards])
    start, end = span(function, captured)
    counts = captured.ops, captured.inputs
    return records.GraphRecord(
        made, captured.graph, *counts, start, name, entry.guards, end, all_ops, guarded
    )


def residual(function: FunctionType, captured: Captured, made: str, name: str, argv: Sequence[Any]) -> None:
    """The code that runs in place of a frame, and what goes on after a break."""
    original = (forward_of(function, argv) or function).__code__
    broke = None if captured.reason is None else captured.reason.at
    records.emit(records.ResidualRecord(name, captured.code, original, made, broke))
    if log.wants("code") and (made or not is_library(original.co_filename)):
        log.say("code", f"{name}\n{beside(original, captured.code, made, broke)}")
    for code in captured.continued:
        records.emit(records.ResidualRecord(name, code))


def span(function: FunctionType, captured: Captured) -> tuple[Place, Place]:
    """Where a graph begins and ends in the frame, or below it where the frame is in torch's own code."""
    assert captured.graph is not None
    ops = [node for node in captured.graph.graph.nodes if node.op.startswith("call")]
    first = outermost(places_of(ops[0].meta.get("stack_trace") or "")) if ops else None
    end = place_at(*captured.end)
    if is_library(end.file):
        last = outermost(places_of(ops[-1].meta.get("stack_trace") or "")) if ops else None
        at = captured.reason.at if captured.reason is not None else None
        end = at if at is not None and not is_library(at.file) else last or end
    return first or defined(function), end


def outermost(places: Sequence[Place]) -> Place | None:
    """The outermost line that is not in torch's own code."""
    return next((place for place in places if not is_library(place.file)), places[0] if places else None)


def defined(function: FunctionType, argv: Sequence[Any] = ()) -> Place:
    """Where a function is defined; where it is torch's own, the one of the program that it calls."""
    code = outermost_code((forward_of(function, argv) or function).__code__)
    return Place(code.co_filename, code.co_firstlineno, code.co_qualname)


def outermost_code(code: CodeType) -> CodeType:
    """The outermost code that is not torch's own, of a function that goes on with what is left of calls."""
    rests = (const.function.__code__ for const in code.co_consts if type(const) is Within)
    rest = next(rests, None) if is_library(code.co_filename) else None
    return code if rest is None else outermost_code(rest)


def forward_of(function: FunctionType, argv: Sequence[Any]) -> FunctionType | None:
    """The forward that a call of a module leads to; None for another function."""
    if not argv or not isinstance(argv[0], torch.nn.Module) or not is_library(function.__code__.co_filename):
        return None
    forward = inspect.unwrap(type(argv[0]).forward)
    return forward if isinstance(forward, FunctionType) else None


def recompiled(
    function: FunctionType, argv: Sequence[Any], name: str, failures: Sequence[Sequence[Failure]], limit: int,
    resumed: bool, dynamic: bool | None, causes: Counter[str],
) -> bool:  # fmt: skip
    """No entry holds: leave the record, warn of what keeps happening; whether the limit is reached.

    `failures` are those of each entry; the record has those of the entry that is nearest. `causes` counts
    how often the function was compiled again for each of them.
    """
    entries = len(failures)
    failures = [list(map(fixed, found)) if dynamic is False else found for found in failures if found]
    nearest = tuple([spoken(one, function, argv) for one in outer(min(failures, key=len, default=()))])
    reasons = tuple([str(spoken(found[0], function, argv)) for found in failures])
    place, limited = defined(function, argv), entries >= limit
    records.emit(records.RecompileRecord(
        name, reasons or ("the guards hold now",), place, nearest, limited, resumed
    ))  # fmt: skip
    if not nearest:
        return limited
    worst = nearest[0]
    causes[worst.source] += 1
    read = f", read at {worst.place.file}:{worst.place.line}" if worst.place else ""
    text = f"{worst.guard}{read}; {worst.advice}"
    where, count = f"{name} ({place.file}:{place.line})", causes[worst.source]
    if limited:
        log.warn_once(("cache_limit", place.file, place.line, name),
                      f"{where} was compiled {entries} times and runs eagerly from now on; "
                      f"the guard that keeps failing: {text}")  # fmt: skip
    elif count >= OFTEN:
        log.warn_once(("recompiles", place.file, place.line, worst.source),
                      f"{where} is compiled again and again, {count} times so far: {text}")  # fmt: skip
    return limited


def fixed(one: Failure) -> Failure:
    """A failure of what was compiled with `dynamic=False`: no mark ends it."""
    return replace(one, advice=UNFIX) if "mark_dynamic" in one.advice else one


def outer(failures: Sequence[Failure]) -> list[Failure]:
    """The failures without those about what is in a container that fails itself."""
    sources = [one.source for one in failures]
    return [one for one in failures if not any(one.source.startswith(f"{base}[") for base in sources)]


def spoken(one: Failure, function: FunctionType, argv: Sequence[Any]) -> Failure:
    """A failure in the words of the program: the arguments of a module's call are those of its forward."""
    own, code = f"{INSIDE}{outermost_code(function.__code__).co_name}", function.__code__
    if own in one.source and is_library(code.co_filename):
        one = renamed(one, own, "")
    if STACK in one.source:
        return replace(
            one, guard=STACKED.sub(CARRIED, one.guard), source=STACKED.sub(CARRIED, one.source),
            advice="keep it a tensor, or have the break before it go away",
        )  # fmt: skip
    forward = forward_of(function, argv)
    if forward is None:
        return one
    names = list(forward.__code__.co_varnames[1 : forward.__code__.co_argcount])
    place, text = one.place, one
    if place is None or is_library(place.file):
        given = [name for i, name in enumerate(names) if f"args[{i}]" in one.source]
        given += [name for name in names if f"kwargs[{name!r}]" in one.source]
        place = read_at(forward, given)
    for i, name in enumerate(names):
        for old in (f"kwargs[{name!r}]", f"args[{i}]"):
            text = renamed(text, old, name)
    return replace(text, place=place)


def renamed(one: Failure, old: str, new: str) -> Failure:
    """A failure with another name for a value."""
    texts = {key: getattr(one, key).replace(old, new) for key in ("guard", "source", "advice")}
    return replace(one, **texts)


def read_at(function: FunctionType, names: Sequence[str]) -> Place:
    """The line that reads one of these arguments first; where the function is defined, when none does."""
    code = decode(function.__code__)
    for instruction in code.instructions:
        if instruction.name.startswith("LOAD_FAST") and instruction.value in names:
            return place_at(code, instruction.index)
    return defined(function)


def failed(name: str, error: Exception, function: FunctionType) -> None:
    """Capture failed for a reason of ours."""
    fell_back(name, error, "runs eagerly after an internal error", "\n".join(source_of(function.__code__)))
