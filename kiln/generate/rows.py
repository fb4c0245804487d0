"""Rows that several phases go over: costly values are kept beside them."""

from __future__ import annotations

import torch

from kiln.base.symbols import Expr
from kiln.fuse.costs import COSTLY
from kiln.fuse.nest import Apply, Load, Place, Term, children
from kiln.generate.functions import compute_type
from kiln.generate.lanes import row_terms
from kiln.generate.scalar import TYPES
from kiln.generate.values import Values

#: Elements of rows that are kept on the stack, where a later phase needs them again, of all values together.
LONGEST_KEPT = 65536
#: Elements of rows of half types that are kept as floats where three phases read them, near by.
LONGEST_WIDENED = 6144


class Rows(Values):
    """Says what phases of a nest do for each other."""

    def keep_costly(self, last: int) -> None:
        """Find the costly values that several phases need, and memory on the stack for a row of each."""
        axis = self.vector
        if axis is None or not axis.reduced or len(self.nest.reduced) > 1 or not isinstance(axis.size, int):
            return
        if last == 0 or self.kept_rows:
            return
        phases: dict[int, set[int]] = {}
        costly: dict[int, Term] = {}
        for phase in range(last + 1):
            roots = [f.value for f in self.nest.folds() if f.phase == phase]
            roots += [s.value for s in self.nest.stores if s.phase == phase and not s.kept]
            for term in row_terms(roots):
                costs = isinstance(term, Apply) and term.op in COSTLY or _widens(term)
                if costs and self.varies(term):
                    phases.setdefault(id(term), set()).add(phase)
                    costly[id(term)] = term
        often = 2 if axis.size <= LONGEST_WIDENED else last + 1
        few = {key: often if _widens(term) else 1 for key, term in costly.items()}
        several = {key: min(found) for key, found in phases.items() if len(found) > few[key]}
        below = {id(t) for key in several for t in row_terms(list(children(costly[key])))}
        wanted = [key for key in several if key not in below]
        room = axis.size + 2 * self.width  # vectors begin in the row, and may end behind it
        for key in wanted if axis.size * len(wanted) <= LONGEST_KEPT else ():
            kind = compute_type(TYPES[costly[key].dtype])
            memory = self.fn.at_entry(f"alloca [{room} x {kind}], align 64")
            self.kept_rows[key] = (several[key], memory)

    def varies(self, term: Term) -> bool:
        """Whether a value depends on the vector axis."""
        assert self.vector is not None
        return any(
            isinstance(t.index, Expr) and self.vector.variable in t.index.symbols()
            for t in row_terms([term])
            if isinstance(t, (Load, Place))
        )


def _widens(term: Term) -> bool:
    """Whether a value of a half type becomes one of f32, which takes some instructions."""
    if not isinstance(term, Apply) or term.op != "convert" or term.dtype is not torch.float32:
        return False
    return bool(term.args[0].dtype.itemsize == 2)
