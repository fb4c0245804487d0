"""Machine code in parts: functions call each other across them, all are there, and other threads make them."""

import ctypes
import os
import threading

import pytest
import torch
from llvmlite.binding import ffi

import kiln
from kiln.generate import code, cpu
from kiln.generate.llvm import BRIEF, F64, I64, Module


def defined(name, value, *called):
    calls = "".join(f"  call void @{other}(ptr %p)\n" for other in called)
    store = f"  %o.{value} = load i64, ptr %p\n  %n.{value} = add i64 %o.{value}, {value}\n  store i64 %n.{value}, ptr %p\n"
    mark = BRIEF if called else "noinline"
    return f"define void @{name}(ptr %p) {mark} {{\n{calls}{store}  ret void\n}}\n"


TEXT = "declare double @llvm.fabs.f64(double)\n" + "\n".join([
    defined("nest0", 1), defined("nest1", 10), defined("nest2", 100), defined("entry0", 1000, "nest0"),
    defined("entry1", 1000, "nest0", "nest1"), defined("entry2", 1000, "nest2"),
])  # fmt: skip
VALUES = {"entry0": 1001, "entry1": 1011, "entry2": 1100}


def called(made, name):
    place = ctypes.c_int64(0)
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(made.address(name))(ctypes.addressof(place))
    return place.value


def names(part):
    return {line.split("@")[1].split("(")[0] for line in part.splitlines() if line.startswith("define")}


@pytest.mark.parametrize("head", [True, False])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_functions_call_each_other_across_parts(count, head):
    parts = cpu.parts_of(TEXT if head else TEXT.partition("\n")[2], count)
    found = [names(part) for part in parts]
    assert len(parts) == count + 1 and sum(map(len, found)) == 6 and found[count] == {*VALUES}
    assert all(("@llvm.fabs" in part) is head for part in parts)
    assert parts[count].count("declare void @nest") == 3 and "declare void" not in parts[0]
    made = cpu.load(cpu.joined(list(cpu.workers().map(cpu.object_file, parts))))
    assert {name: called(made, name) for name in VALUES} == VALUES and made.address("entry9") == 0


def test_parts_have_constants_of_their_own():
    def nest(name, first):
        row = ", ".join(f"float {first + i}.0" for i in range(16))
        body = f"%x = load <16 x float>, ptr %p, align 4\n%y = fadd <16 x float> %x, <{row}>\nstore <16 x float> %y, ptr %p, align 4"
        return f"define void @{name}(ptr %p) noinline {{\n{body}\nret void\n}}\n"

    entry = f"define void @entry0(ptr %p) {BRIEF} {{\ncall void @nest0(ptr %p)\ncall void @nest1(ptr %p)\nret void\n}}\n"
    parts = cpu.parts_of("".join([nest("nest0", 100), nest("nest1", 2000), entry]), 2)
    made = cpu.load(cpu.joined(list(map(cpu.object_file, parts))))
    row = (ctypes.c_float * 16)(*range(16))
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(made.address("entry0"))(ctypes.addressof(row))
    assert len(parts) == 3 and list(row) == [2100 + 3 * i for i in range(16)]


def test_a_thread_asks_few_times_for_the_lock_of_python(monkeypatch):
    asked = []
    call = ffi._lib_fn_wrapper.__call__
    at_once = cpu.at_once
    cpu._generated(TEXT, True)  # its tools are there
    monkeypatch.setattr(ffi._lib_fn_wrapper, "__call__", lambda self, *args: asked.append("locked") or call(self, *args))
    monkeypatch.setattr(cpu, "at_once", lambda name: asked.append(name) or at_once(name))
    for part in cpu.parts_of(TEXT, 1):
        cpu.object_file(part)
    passes, parse, emit = "LLVMPY_RunNewModulePassManager", "LLVMPY_ParseAssembly", "LLVMPY_TargetMachineEmitToMemory"
    assert asked == [parse, passes, emit, parse, emit]


def test_a_part_that_no_thread_has_begun_is_made_by_the_one_that_waits():
    gate, busy = threading.Event(), [threading.Event() for _ in range(cpu.workers()._max_workers)]
    held = [cpu.workers().submit(lambda begun=begun: begun.set() or gate.wait(60)) for begun in busy]
    assert all(begun.wait(60) for begun in busy)
    try:
        made = code.code_for(TEXT.replace("entry1", "entry7"), None)
        assert made.source == "compiled" and called(made.wait(), "entry7") == 1011
        assert not any(future.done() for future in held)
    finally:
        gate.set()


def test_object_files_are_found_in_what_they_are_joined_to():
    assert cpu.separate(cpu.joined([b"one", b"", b"three" * 99])) == [b"one", b"", b"three" * 99]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_process_that_is_forked_off_has_its_code():
    made = code.code_for(TEXT.replace("entry1", "entry5"), None)
    assert made.source == "compiled"
    child = os.fork()
    if not child:
        right = called(made.wait(), "entry5") == 1011 and called(code.code_for(TEXT, None).wait(), "entry0") == 1001
        os._exit(0 if right else 1)
    assert os.waitpid(child, 0)[1] == 0 and called(made.wait(), "entry5") == 1011


def test_the_backward_is_begun_while_the_forward_is_made(monkeypatch):
    monkeypatch.setenv("KILN_CACHE", "0")
    begun = []
    start = code.compiling
    monkeypatch.setattr(code, "compiling", lambda text: begun.append(text) or start(text))
    kiln.reset()
    x = torch.linspace(-2, 2, 23 * 7).reshape(23, 7).requires_grad_()
    out = kiln.compile(lambda x: (torch.tanh(x) * 1.2345).softmax(-1))(x)
    assert len(begun) == 2
    (out * torch.arange(7.0)).sum().backward()
    grad, x.grad = x.grad, None
    ((torch.tanh(x) * 1.2345).softmax(-1) * torch.arange(7.0)).sum().backward()
    torch.testing.assert_close(grad, x.grad)
    assert len(begun) == 2


def test_the_backward_of_a_loss_is_begun_where_there_is_one(monkeypatch):
    monkeypatch.setenv("KILN_CACHE", "0")
    begun = []
    start = code.compiling
    monkeypatch.setattr(code, "compiling", lambda text: begun.append(text) or start(text))

    def f(x):
        y = torch.tanh(x) * 1.2346
        return y, (y * y).mean()

    kiln.reset()
    x = torch.linspace(-2, 2, 23 * 7).reshape(23, 7).requires_grad_()
    _, loss = kiln.compile(f)(x)
    assert len(begun) == 2
    (grad,) = torch.autograd.grad(loss, x)
    torch.testing.assert_close(grad, torch.autograd.grad(f(x)[1], x)[0])
    assert len(begun) == 2
    out = kiln.compile(f)(x)  # the other gradients are compiled when they are asked for
    (grad,) = torch.autograd.grad(sum(map(torch.sum, out)), x)
    torch.testing.assert_close(grad, torch.autograd.grad(sum(map(torch.sum, f(x))), x)[0])


def test_what_was_computed_is_not_computed_again():
    module = Module()
    fn = module.function("f", [("n", I64)], F64)
    n = fn.parameters["n"]
    before = n * 3

    def turn(i, held):
        inside = i * 5
        assert (n * 3).text == before.text and (i * 5).text == inside.text
        return [held[0] + inside.to(F64)]

    (total,) = fn.loop(0, n, 1, [fn.constant(0.0, F64)], turn)
    yes, after = fn.label("yes"), fn.label("after")
    fn.branch(n > 2, yes, after)
    fn.start(yes)
    arm = n * 7
    fn.jump(after)
    fn.start(after)
    assert (n * 7).text != arm.text  # control may come here without it
    fn.do(f"ret double {total.text}")
    text = module.text()
    assert text.count("mul i64 %n, 3") == 1 and text.count("mul i64 %n, 7") == 2
    address = cpu.compile_text(text)
    assert ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_int64)(address.address("f"))(4) == 30.0


def test_a_wrong_module_is_refused():
    """Given to the code generator, it would end the process."""
    text = "declare i64 @llvm.ctpop.i64(float)\ndefine i64 @f(float %x) {\n  %r = call i64 @llvm.ctpop.i64(float %x)\n  ret i64 %r\n}\n"
    with pytest.raises(RuntimeError, match="ntrinsic"):
        cpu.compile_text(text)
