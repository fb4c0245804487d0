"""`kiln.measure`: what a model costs, by module, found by running it on fakes, and the table of it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from kiln.base.dataclass import dataclass
from kiln.modes.fake import fake
from kiln.modes.flops import FLOPS
from kiln.modes.memory import Ledger
from kiln.ops.fake import LARGEST_FOLDED, LITERALS, FakeTensor, fake_like, tensors_in


@dataclass(frozen=True, slots=True)
class Row:
    """One module, its submodules included."""

    name: str
    kind: str
    parameters: int
    parameter_bytes: int
    buffer_bytes: int
    saved_bytes: int
    """What autograd keeps for the backward pass, each memory once, without parameters and buffers."""
    forward_flops: int
    backward_flops: int
    peak_bytes: int
    """The most that was alive at once while this module ran, forward or backward: of the whole program."""
    calls: int

    @property
    def depth(self) -> int:
        return self.name.count(".") + 1 if self.name else 0

    @property
    def flops(self) -> int:
        return self.forward_flops + self.backward_flops


COLUMNS: dict[str, Callable[[Row], str]] = {
    "parameters": lambda row: scaled(row.parameters, 1000, ""),
    "weights": lambda row: scaled(row.parameter_bytes, 1024, "B"),
    "buffers": lambda row: scaled(row.buffer_bytes, 1024, "B"),
    "saved": lambda row: scaled(row.saved_bytes, 1024, "B"),
    "FLOPs forward": lambda row: scaled(row.forward_flops, 1000, ""),
    "FLOPs backward": lambda row: scaled(row.backward_flops, 1000, ""),
    "peak": lambda row: scaled(row.peak_bytes, 1024, "B"),
}


@dataclass(frozen=True, slots=True)
class Measurement:
    """What a model costs: the whole of it, and by module. Prints as a table."""

    rows: tuple[Row, ...]
    backward: bool

    @property
    def total(self) -> Row:
        """The row of the model itself."""
        return self.rows[0]

    def __getattr__(self, name: str) -> Any:
        """What the row of the model itself says: `parameters`, `flops`, `peak_bytes`, …"""
        if name.startswith("_") or name not in dir(Row):
            raise AttributeError(name)
        return getattr(self.total, name)

    def __getitem__(self, name: str) -> Row:
        """The row of a module by its name; the model's own is ''."""
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(f"no module {name!r}: see .rows for all names")

    def table(self, depth: int | None = None) -> str:
        """The rows down to a depth as text; neighbours that cost the same are one line."""
        lines = [("module", *COLUMNS)]
        for row, times in merged([r for r in self.rows if depth is None or r.depth <= depth]):
            label = "  " * row.depth + (row.name.rpartition(".")[2] or row.kind)
            if row.name:
                label += f" ({row.kind})"
            if times > 1:
                label += f" x{times}"
            lines.append((label, *[show(row) for show in COLUMNS.values()]))
        first, *others = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = ["  ".join([line[0].ljust(first), *map(str.rjust, line[1:], others)]) for line in lines]
        return "\n".join([text[0], "-" * len(text[0]), *text[1:]])

    def __str__(self) -> str:
        return self.table()

    __repr__ = __str__


def merged(rows: list[Row]) -> Iterator[tuple[Row, int]]:
    """The rows in order; modules of a list that follow each other and cost the same, with all below them, are
    given once, with their number."""
    i = 0
    while i < len(rows):
        size = below(rows, i)
        block = [_cost(r, rows[i]) for r in rows[i : i + size]]
        times, after = 1, i + size
        while after < len(rows) and _siblings(rows[i], rows[after]):
            next_block = [_cost(r, rows[after]) for r in rows[after : after + size]]
            if next_block != block or below(rows, after) != size:
                break
            times, after = times + 1, after + size
        yield rows[i], times
        if times > 1:
            yield from merged(rows[i + 1 : i + size])
            i = after
        else:
            i += 1


def below(rows: list[Row], start: int) -> int:
    """The number of rows of the module at `start` and all in it."""
    end = start + 1
    while end < len(rows) and rows[end].depth > rows[start].depth:
        end += 1
    return end - start


def _siblings(a: Row, b: Row) -> bool:
    """Whether two modules stand in one list."""
    (above, _, one), (other, _, two) = a.name.rpartition("."), b.name.rpartition(".")
    return above == other and one.isdigit() and two.isdigit()


def _cost(row: Row, top: Row) -> tuple[object, ...]:
    """What two blocks must share to be shown as one; peaks grow from layer to layer and are left out."""
    flops = row.forward_flops, row.backward_flops
    return row.name[len(top.name) :], row.kind, row.parameter_bytes, row.buffer_bytes, row.saved_bytes, flops


def scaled(value: int, step: int, unit: str) -> str:
    """A number with three digits and a prefix."""
    if not value:
        return "-"
    amount, prefixes = float(value), ["", "K", "M", "G", "T", "P", "E"]
    while amount >= step and len(prefixes) > 1:
        amount /= step
        prefixes.pop(0)
    prefix = prefixes[0] + ("i" if step == 1024 and prefixes[0] else "")
    digits = f"{amount:.0f}" if not prefixes[0] or amount >= 100 else f"{amount:.3g}"
    return f"{digits} {prefix}{unit}".rstrip()


_sequence = torch._C._autograd._get_sequence_nr
_node = torch._C._current_autograd_node


def measure(model: nn.Module, *inputs: Any, backward: bool = True, **keywords: Any) -> Measurement:
    """What one call of `model` costs, by module: parameters, buffers, saved activations, FLOPs, peak bytes.

    Nothing of that size is allocated: the call, and the backward pass from its loss or its results, run on
    fakes. Model and inputs may be real or made under `kiln.fake()`; both stay as they are. Of small real
    inputs of integers and booleans, masks for example, the values are known.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"measure takes a module and the arguments of its call, got {type(model).__name__}")
    tally = Tally(model)
    with _Metering(tally), replaced(model, tally.ledger):
        args, kwargs = tally.given(inputs), tally.given(keywords)
        with tally.watching():
            out = model(*args, **kwargs)
            roots = [t for t in tensors_in(loss_of(out)) if t.requires_grad]
            if backward and roots:
                torch.autograd.backward(roots, [torch.ones_like(t) for t in roots])
    return Measurement(tuple(tally.rows()), bool(backward and roots))


class Account:
    """What was counted for one module alone."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name, self.module = name, module
        self.saved: dict[int, int] = {}
        self.flops = [0, 0]
        self.peak = 0
        self.calls = 0


class Tally:
    """Who runs now, and what it costs: fed by the dispatch mode, hooks of modules and of saved tensors."""

    def __init__(self, model: nn.Module) -> None:
        self.ledger = Ledger()
        self.accounts = {id(m): Account(name, m) for name, m in model.named_modules()}
        self.root = self.accounts[id(model)]
        self.stack = [self.root]
        # From which number on autograd's nodes belong to which module: backward finds its module there.
        self.since: list[int] = [0]
        self.owner: list[Account] = [self.root]

    def given(self, value: Any) -> Any:
        """The nest of arguments with fakes for its tensors, counted as alive."""
        if isinstance(value, torch.Tensor):
            twin = fake_like(value)
            self.ledger.hold(twin)
            return know(twin, value)
        if type(value) in (list, tuple):
            return type(value)([self.given(v) for v in value])
        return {k: self.given(v) for k, v in value.items()} if type(value) is dict else value

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Follow the calls of modules and what autograd saves."""
        hooks = [
            register_module_forward_pre_hook(self.enter),
            register_module_forward_hook(self.leave, always_call=True),
        ]
        try:
            with saved_tensors_hooks(self.save, lambda saved: saved):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def enter(self, module: nn.Module, args: Any) -> None:
        account = self.accounts.get(id(module), self.stack[-1])
        account.calls += account.module is module
        self.stack.append(account)
        self.switch(account)

    def leave(self, module: nn.Module, args: Any, out: Any) -> None:
        if len(self.stack) > 1:
            self.stack.pop()
        self.switch(self.stack[-1])

    def switch(self, account: Account) -> None:
        if _node() is None:
            self.since.append(_sequence())
            self.owner.append(account)
        account.peak = max(account.peak, self.ledger.live)

    def save(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count what autograd saves; the hook gives it back as it is."""
        if isinstance(tensor, FakeTensor):
            memory = self.ledger.of(tensor)
            if not memory.state:
                self.now().saved[memory.number] = memory.bytes
        return tensor

    def now(self) -> Account:
        """The module that runs: by its call, or in the backward pass by the node of its forward pass."""
        node = _node()
        if node is None or len(self.stack) > 1:
            return self.stack[-1]
        return self.owner[bisect_right(self.since, node._sequence_nr()) - 1]

    def note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Count one op."""
        self.ledger.enter(func, args, kwargs, out)
        account = self.now()
        if account.peak < self.ledger.live:
            account.peak = self.ledger.live
        counter = FLOPS.get(func)
        if counter is not None:
            account.flops[_node() is not None] += counter(args, first(out))

    def rows(self) -> Iterator[Row]:
        """A row for each module, in the order of their names, with all that belongs to its submodules."""
        for account in self.accounts.values():
            module, prefix = account.module, account.name and account.name + "."
            inner = [a for a in self.accounts.values() if a.name.startswith(prefix) or a is account]
            saved: dict[int, int] = {}
            for a in inner:
                saved.update(a.saved)
            parameters = list(module.parameters())
            yield Row(
                name=account.name,
                kind=type(module).__name__,
                parameters=sum(p.numel() for p in parameters),
                parameter_bytes=sum(p.numel() * p.element_size() for p in parameters),
                buffer_bytes=sum(b.numel() * b.element_size() for b in module.buffers()),
                saved_bytes=sum(saved.values()),
                forward_flops=sum(a.flops[0] for a in inner),
                backward_flops=sum(a.flops[1] for a in inner),
                peak_bytes=max(a.peak for a in inner),
                calls=account.calls,
            )


class _Metering(fake):
    """Fakes whose every op is counted."""

    def __init__(self, tally: Tally) -> None:
        super().__init__()
        self.tally = tally

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.tally.note(func, args, kwargs or {}, out)
        return out


def know(twin: FakeTensor, real: torch.Tensor) -> FakeTensor:
    """`twin` with the contents of a small real tensor unless of floats: a mask may decide what is run."""
    small = real.numel() <= LARGEST_FOLDED and not real.is_inference()
    if type(real) is torch.Tensor and small and not real.is_floating_point() and not real.is_complex():
        twin.value, twin.value_version = real, twin._version
        LITERALS.made = True
    return twin


@contextmanager
def replaced(model: nn.Module, ledger: Ledger) -> Iterator[None]:
    """Fakes in place of the parameters and buffers of a model, for a while; what was shared stays shared."""
    twins: dict[int, FakeTensor] = {}
    originals: list[tuple[nn.Module, str, str, torch.Tensor]] = []
    try:
        for module in model.modules():
            for group in ("_parameters", "_buffers"):
                for name, tensor in list(getattr(module, group).items()):
                    if tensor is None:
                        continue
                    if id(tensor) not in twins:
                        twins[id(tensor)] = fake_like(tensor)
                        ledger.hold(twins[id(tensor)], state=True)
                    originals.append((module, group, name, tensor))
                    exchange(module, group, name, twins[id(tensor)])
        yield
    finally:
        for module, group, name, tensor in originals:
            exchange(module, group, name, tensor)


def exchange(module: nn.Module, group: str, name: str, tensor: torch.Tensor) -> None:
    """Put a tensor in the place of a parameter or buffer; modules that keep lists of them are told."""
    if type(module).__setattr__ is nn.Module.__setattr__:
        getattr(module, group)[name] = tensor
    else:
        setattr(module, name, tensor)


def loss_of(out: Any) -> Any:
    """Where the backward pass starts: the loss in a result that has one, or the whole result."""
    loss = out.get("loss") if isinstance(out, dict) else None
    return loss if isinstance(loss, torch.Tensor) else out


def first(out: Any) -> Any:
    """The first result of an op."""
    return out[0] if isinstance(out, (tuple, list)) and out else out
