"""What is the same in all turns of a loop stands before it, so that few of LLVM's passes are needed."""

import ctypes

import torch

from kiln.expand.expand import expand
from kiln.fuse.loops import FOR_LOOPS
from kiln.fuse.program import fuse
from kiln.generate.code import variant
from kiln.generate.cpu import compile_text
from kiln.generate.llvm import F64, I64, PTR, THOROUGH, Module
from kiln.generate.schedule import USUAL
from kiln.ops.record import recorded


def function(high, body):
    """A function over `x`, which is not written, `y` and a number of turns, with a loop inside of another."""
    module = Module()
    module.hoists = True
    fn = module.function("run", [("x", PTR), ("y", PTR), ("n", I64), ("d", I64)])
    fn.unwritten = {"%x"}
    given = fn.parameters
    fn.loop(given["d"], given["n"], 1, [], lambda i, _: fn.loop(0, high(given), 1, [], body(fn, given, i)))
    fn.do("ret void")
    return module, fn


def depth(text, instruction):
    """The loops around the one line that has an instruction."""
    (before,) = [part for part in [text.split(instruction)] if len(part) == 2]
    return before[0].count("\nhead") - before[0].count("\ndone")


def products(fn, given, i):
    def turn(j, _):
        scaled = fn.load(fn.at(given["x"], i, F64), F64) * 3.0
        fn.store(scaled, fn.at(given["y"], i * 4 + j, F64))
        return []

    return turn


def test_values_and_loads_leave_loops_that_have_a_turn():
    module, fn = function(lambda given: 4, products)
    text = module.text()
    assert depth(text, "load double") == depth(text, "fmul double") == depth(text, "mul i64") == 1
    assert fn.short_loops and depth(text, "store double") == 2
    x, y = torch.arange(3.0, dtype=torch.float64), torch.zeros(3, 4, dtype=torch.float64)
    code = compile_text(text)
    ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 2)(code.address("run"))(
        x.data_ptr(), y.data_ptr(), 3, 0
    )
    assert torch.equal(y, (x * 3).unsqueeze(1).expand(3, 4))


def test_a_load_stays_in_a_loop_that_may_have_no_turn():
    module, fn = function(lambda given: given["n"], products)
    assert depth(module.text(), "load double") == depth(module.text(), "fmul double") == 2
    assert not fn.short_loops


def test_a_division_stays_where_it_is_unless_it_cannot_fail():
    def quotients(fn, given, i):
        def turn(j, _):
            fn.store(given["n"] / given["d"] + given["n"] / 7, fn.at(given["y"], j, I64))
            return []

        return turn

    text = function(lambda given: 4, quotients)[0].text()
    divisions = [line for line in text.splitlines() if "sdiv" in line]
    assert [depth(text, line) for line in divisions if line.endswith("%d")] == [2]
    assert [depth(text, line) for line in divisions if line.endswith(" 7")] == [0]


def text_of(function, *inputs):
    (launch,) = fuse(expand(recorded(function, *inputs), "prims", FOR_LOOPS)).steps
    return variant(launch.kernel, USUAL)[0]


def test_only_tiles_and_short_loops_need_all_passes():
    assert THOROUGH not in text_of(lambda x: torch.rsqrt(x) + 1, torch.rand(64, 1000))
    assert THOROUGH in text_of(lambda x: x.t().contiguous(), torch.rand(64, 64))


def test_a_loop_that_only_computes_is_left_out():
    def body(fn, given, i):
        def turn(j, _):
            fn.at(given["y"], i * 4 + j, F64)
            return []

        return turn

    module, fn = function(lambda given: given["n"], body)
    assert "head" not in module.text()
    module, fn = function(lambda given: 4, lambda fn, given, i: lambda j, _: [])
    assert "head" not in module.text() and not fn.short_loops


def test_what_leaves_an_empty_loop_is_known_after_it():
    module = Module()
    module.hoists = True
    fn = module.function("run", [("y", PTR), ("n", I64)])
    given = fn.parameters
    fn.loop(0, given["n"], 1, [], lambda i, _: [given["n"] * 3][:0])
    fn.store(given["n"] * 3, given["y"])
    fn.do("ret void")
    text = module.text()
    assert "head" not in text and text.count("mul i64") == 1
    y = torch.zeros(1, dtype=torch.int64)
    code = compile_text(text)
    ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)(code.address("run"))(y.data_ptr(), 7)
    assert y.item() == 21


def test_a_short_loop_around_others_is_not_unrolled():
    module = Module()
    fn = module.function("run", [("y", PTR), ("n", I64)])

    def store(i, _):
        fn.store(i, fn.at(fn.parameters["y"], i, I64))
        return []

    fn.loop(0, 4, 1, [], lambda i, _: fn.loop(0, fn.parameters["n"], 1, [], store))
    assert not fn.short_loops
    fn.loop(0, fn.parameters["n"], 1, [], lambda i, _: fn.loop(0, 4, 1, [], store))
    assert fn.short_loops


def test_columns_of_one_task_are_a_known_number():
    text = text_of(lambda x: x.sum(0), torch.rand(128, 192))
    assert "masked" not in text
