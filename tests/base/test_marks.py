"""Marks: looked up by object, forgotten with it."""

import gc

from kiln.base import marks


def test_marks_of_functions_methods_and_natives():
    class Thing:
        def method(self):
            pass

    marks.add(Thing.method, marks.ALLOW)
    marks.add(Thing.method, marks.CONSTANT)
    assert marks.of(Thing().method) == {marks.ALLOW, marks.CONSTANT}
    marks.remove(Thing.method, marks.ALLOW)
    assert marks.of(Thing.method) == {marks.CONSTANT}
    marks.remove(Thing.method, marks.ALLOW)
    marks.add(str.upper, marks.DISALLOW)
    assert marks.of(str.upper) == {marks.DISALLOW} and marks.of(str.lower) == marks.NONE
    marks.remove(str.upper, marks.DISALLOW)
    assert marks.of(str.upper) == marks.NONE


def test_a_mark_goes_with_its_function():
    gc.collect()
    before = len(marks._table)
    for _ in range(100):
        marks.add(lambda: None, marks.SKIP)
    gc.collect()
    assert len(marks._table) == before
