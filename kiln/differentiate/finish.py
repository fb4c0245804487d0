"""After the graph has run: new values are written back and the outputs are made of results and arguments."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch.autograd.graph import increment_version

from kiln.base.errors import untouched
from kiln.base.expressions import Expr, Symbol
from kiln.base.graph import expressions_in, mapped
from kiln.base.keys import below
from kiln.differentiate.joint import (
    Attribute,
    Constant,
    Fresh,
    Given,
    Joint,
    Mutation,
    Origin,
    Output,
    Placeholder,
    View,
)

Results: TypeAlias = Sequence[Any]
Args: TypeAlias = tuple[Any, ...]
Sizes: TypeAlias = Callable[[Args], Mapping[Symbol, Any]]
Finish: TypeAlias = Callable[[Results, Args], Any]

_switch = torch._C._set_grad_enabled


def finisher(
    joint: Joint, attributes: Mapping[str, Any], sizes: Sizes, overwrites: Container[int] = ()
) -> Finish:
    """A function from the results and the arguments to what the captured graph returns.

    `overwrites` are the results that may have been written where they belong.
    """
    outputs = _outputs(joint, attributes, sizes)
    writes = [_write(joint, m, attributes) for m in joint.mutated if m.with_grad]
    for counted in (False, True):
        together = [m for m in joint.mutated if not m.with_grad and bool(m.counted) is counted]
        if together:
            writes.append(_writes(joint, together, attributes, counted, overwrites))
    if not joint.mutated and not joint.effects:
        return outputs

    def finish(results: Results, args: Args) -> Any:
        for write in writes:
            write(results, args)
        out = outputs(results, args)
        for function, arguments in joint.effects:
            function(*arguments)
        return out

    return finish


def gives_results(joint: Joint) -> bool:
    """Whether the captured graph returns the results of the traced one, in order, and does no more."""
    places = [output.index for output in joint.outputs if isinstance(output, Fresh)]
    as_they_are = places == list(range(joint.results)) and joint.nest == tuple(range(len(joint.outputs)))
    return as_they_are and len(places) == len(joint.outputs) and not joint.mutated and not joint.effects


# Outputs


def _outputs(joint: Joint, attributes: Mapping[str, Any], sizes: Sizes) -> Finish:
    """A function that makes the outputs, one object for each `Output`."""
    fresh = [output.index for output in joint.outputs if isinstance(output, Fresh)]
    if len(fresh) == len(joint.outputs) and joint.nest == tuple(range(len(fresh))):
        return lambda results, args: tuple([results[i] for i in fresh])
    distinct = {id(output): output for output in joint.outputs}
    places = {key: i for i, key in enumerate(distinct)}
    order = [places[id(output)] for output in joint.outputs]
    wholes = _wholes(distinct.values())
    together = [_view(whole, attributes, sizes) for whole, _ in wholes]
    members = {id(part): at - len(wholes) for at, (_, parts) in enumerate(wholes) for part in parts}
    makers = [
        _part(output, members[key]) if isinstance(output, View) and key in members
        else MAKERS[type(output)](output, attributes, sizes)
        for key, output in distinct.items()
    ]  # fmt: skip
    nest = mapped(joint.nest, lambda leaf: order[leaf] if type(leaf) is int else leaf)
    if not together and nest == tuple(range(len(makers))):
        return lambda results, args: tuple([make(results, args) for make in makers])

    def outputs(results: Results, args: Args) -> Any:
        if together:  # they follow the results
            results = [*results, *[make(results, args) for make in together]]
        made = [make(results, args) for make in makers]
        return mapped(nest, lambda leaf: made[leaf] if type(leaf) is int else leaf)

    return outputs


def _wholes(outputs: Iterable[Output]) -> list[tuple[View, list[View]]]:
    """What gives several views, such as the rows of `unbind`, with these: it is taken once, as in eager."""
    found: dict[str, tuple[View, list[View]]] = {}
    for output in outputs:
        if isinstance(output, View) and output.steps[-1].item is not None:
            steps = (*output.steps[:-1], replace(output.steps[-1], item=None))
            whole = View(output.base, steps, output.grad_mode, True)
            found.setdefault(f"{output.base} {steps} {output.grad_mode}", (whole, []))[1].append(output)
    return [(whole, parts) for whole, parts in found.values() if len(parts) > 1]


def _part(output: View, place: int) -> Finish:
    """One of the views that are taken together."""
    item, claims = output.steps[-1].item, output.claims

    def part(results: Results, args: Args) -> Any:
        value = results[place][item]
        return value.detach() if not claims and value.requires_grad else value

    return part


def _given(output: Given, attributes: Mapping[str, Any], sizes: Sizes) -> Finish:
    origin = origin_of(output.origin, attributes)
    return lambda results, args: origin(args)


def _constant(output: Constant, attributes: Mapping[str, Any], sizes: Sizes) -> Finish:
    value = output.value
    if isinstance(value, Expr):
        return lambda results, args: value.evaluate(sizes(args))
    return lambda results, args: value


def _view(output: View, attributes: Mapping[str, Any], sizes: Sizes) -> Finish:
    """Takes the view outside the compiled graph, so that autograd knows it as eager's."""
    base, steps, grad, claims = output.base, output.steps, output.grad_mode, output.claims
    origin = None if isinstance(base, int) else origin_of(base, attributes)
    symbolic = any(expressions_in((step.args, step.kwargs)) for step in steps)
    taken = [step.bound() for step in steps]

    def view(results: Results, args: Args) -> Any:
        value = results[base] if origin is None else origin(args)  # type: ignore[index]
        made = taken
        if symbolic:
            known = sizes(args)
            made = [replace(step, args=resolved(step.args, known), kwargs=resolved(step.kwargs, known))
                    for step in steps]  # fmt: skip
        before = torch.is_grad_enabled()
        if before is not grad:
            _switch(grad)
        try:
            for take in made:
                value = take(value)
            # Without a history, eager had the view made of a detached tensor.
            return value.detach() if not claims and value.requires_grad else value
        finally:
            if before is not grad:
                _switch(before)

    return view


MAKERS: dict[type, Callable[[Any, Mapping[str, Any], Sizes], Finish]] = {
    Fresh: lambda output, attributes, sizes: lambda results, args: results[output.index],
    Given: _given,
    View: _view,
    Constant: _constant,
}


# Writing back


def _write(
    joint: Joint, mutation: Mutation, attributes: Mapping[str, Any]
) -> Callable[[Results, Args], None]:
    """A function that gives a mutated input its new value, as a part of autograd's graph."""
    origin, index = origin_of(joint.primals[mutation.primal].origin, attributes), mutation.index
    more = mutation.counted - 1  # copy_ counts once

    first = mutation is next(m for m in joint.mutated if m.with_grad)
    first = first and all(joint.primals[m.primal].spec.device.type == "cpu" for m in joint.mutated)

    def write(results: Results, args: Args) -> None:
        try:
            with torch.enable_grad():
                increment_version([origin(args).copy_(results[index])] * more)
        except RuntimeError as error:  # autograd refuses views of leaves
            if first:
                untouched(error)
            raise

    return write


def _writes(
    joint: Joint, mutations: Sequence[Mutation], attributes: Mapping[str, Any], counted: bool,
    overwrites: Container[int],
) -> Callable[[Results, Args], None]:
    """A function that gives inputs their new values, all at once, without a history."""
    graph = joint.graph
    places = [
        (origin_of(joint.primals[m.primal].origin, attributes), m.index,
         graph.outputs[m.index] is graph.inputs[m.primal], m.index in overwrites, m.counted)
        for m in mutations
    ]  # fmt: skip

    def write(results: Results, args: Args) -> None:
        targets, values, versions = [], [], []
        for origin, index, itself, may_be, times in places:
            target = origin(args)
            if not itself and not (may_be and in_place(results[index], target)):
                targets.append(target)
                values.append(results[index])
                times -= 1
            if times > 0 and not target.is_inference():  # those count no versions
                versions += [target] * times
        if versions:
            increment_version(versions)
        if targets:
            with torch.no_grad() if counted else below():
                torch._foreach_copy_(targets, values)

    return write


def in_place(value: torch.Tensor, target: torch.Tensor) -> bool:
    """Whether a value was written where it belongs."""
    if value is target:
        return True
    alike = value.layout is target.layout is torch.strided and value.stride() == target.stride()
    return alike and value.shape == target.shape and value.data_ptr() == target.data_ptr()


# Where values come from


def origin_of(origin: Origin, attributes: Mapping[str, Any]) -> Callable[[Args], Any]:
    """A function from the arguments to the tensor that an origin names."""
    if isinstance(origin, Placeholder):
        index = origin.index
        return lambda args: args[index]
    if isinstance(origin, Attribute):
        held = attributes[origin.name]
        return lambda args: held
    index = origin.index
    return lambda args: whole(args[index])


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole memory of a tensor as one flat tensor of its dtype."""
    length = tensor.untyped_storage().nbytes() // tensor.element_size()
    with torch.no_grad():
        return tensor.as_strided((length,), (1,), 0)


def resolved(value: Any, sizes: Mapping[Symbol, Any]) -> Any:
    """A nest with the values of symbolic expressions in place of them."""
    return mapped(value, lambda leaf: leaf.evaluate(sizes) if isinstance(leaf, Expr) else leaf)

