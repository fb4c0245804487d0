"""Decoded instructions say what `dis` says, over the standard library."""

import dis

import pytest

from kiln.bytecode import versions
from kiln.bytecode.decode import decode
from kiln.bytecode.versions import HERE, KIND, REAL, Kind
from tests.bytecode.stdlib import code_objects

RESOLVED = {*dis.hasname, *dis.haslocal, *dis.hasfree, *dis.hasconst, *dis.hascompare}


@pytest.fixture(scope="module")
def library():
    return code_objects()[::8]


def same(ours, theirs):
    return ours is theirs or ours == theirs or (isinstance(ours, tuple) and ours == tuple(theirs))


def check(i, reference, decoded):
    assert (i.op, i.name, i.offset, i.arg) == (
        reference.opcode, reference.opname, reference.offset, reference.arg,
    )  # fmt: skip
    assert i.line == reference.positions.lineno
    if i.op in dis.hasjrel:
        assert i.value == decoded._units[reference.argval >> 1]
    elif i.op in RESOLVED and i.name != "KW_NAMES":
        assert same(i.value, reference.argval) or i.value != i.value


def test_same_as_dis(library):
    for code in library:
        decoded = decode(code)
        listed = [r for r in dis.get_instructions(code) if r.opname not in ("CACHE", "EXTENDED_ARG")]
        assert len(decoded.instructions) == len(listed)
        for index, (i, reference) in enumerate(zip(decoded.instructions, listed, strict=True)):
            assert i.index == index == decoded._units[i.offset >> 1]
            check(i, reference, decoded)


def test_handlers_same_as_dis(library):
    for code in library:
        decoded = decode(code)
        expected = {}
        for entry in dis._parse_exception_table(code):
            for offset in range(entry.start, entry.end, 2):
                expected[offset] = (decoded._units[entry.target >> 1], entry.depth, entry.lasti)
        for i in decoded.instructions:
            assert decoded.handler(i.index) == expected.get(i.offset)


def test_same_code_object_is_decoded_once():
    code = compile("a = b", "x", "exec")
    assert decode(code) is decode(code)
    assert decode(code).code is code
    assert decode(code.replace(co_name="other")) is not decode(code)


def test_every_instruction_has_a_kind():
    unknown = [
        name
        for name, op in REAL.items()
        if op in dis.hasjrel and KIND[op] not in (Kind.FORWARD, Kind.BACKWARD)
    ]
    assert not unknown
    assert all(name in versions.REAL for name in HERE.shifts)
    assert all(KIND[REAL[name]] == Kind.NAME for name in HERE.shifts)


def test_values_are_resolved():
    def f(x):
        return x.real + len([x]) if x < 1 else print(*(), sep=x)

    values = {(i.name, i.value) for i in decode(f.__code__).instructions if not isinstance(i.value, list)}
    assert ("BINARY_OP", "+") in values
    assert ("COMPARE_OP", "<") in values
    assert ("LOAD_ATTR", "real") in values
    assert {("LOAD_GLOBAL", "len"), ("LOAD_GLOBAL", "print")} <= values
    calls = {i.value: i.flag for i in decode(f.__code__).instructions if i.name == "LOAD_GLOBAL"}
    assert calls["len"] is True


def test_long_arguments_are_folded():
    source = "x = (" + ", ".join(f"a{k}" for k in range(300)) + ")"
    decoded = decode(compile(source, "x", "exec"))
    assert [i.value for i in decoded.instructions if i.name == "LOAD_NAME"] == [f"a{k}" for k in range(300)]
    assert all(i.name != "EXTENDED_ARG" for i in decoded.instructions)
