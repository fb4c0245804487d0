"""Records: collected in full by context, kept lightly by the process."""

import contextvars
import threading

from kiln.base import records
from kiln.base.errors import Place
from kiln.base.records import BreakRecord, GraphRecord, Records, ResidualRecord

GRAPH = GraphRecord("g0", object(), 3, 1, Place("f.py", 3, "f"), "f", guards=("x is a tensor",))


def test_collect_keeps_full_records_and_nests():
    with records.collect() as outer:
        records.emit(GRAPH)
        with records.collect() as inner:
            records.emit(ResidualRecord("f", test_collect_keeps_full_records_and_nests.__code__))
    records.emit(GRAPH)
    assert outer.graphs == [GRAPH] and len(outer.residuals) == 1
    assert not inner.graphs and inner.residuals == outer.residuals
    assert repr(outer) == "Records(graphs=1, residuals=1)"


def test_log_keeps_no_graph_and_no_more_than_its_bound():
    records.log.clear()
    for _ in range(records.KEPT + 10):
        records.emit(GRAPH)
    assert len(records.log.graphs) == records.KEPT
    assert records.log.totals["graphs"] == records.KEPT + 10
    assert {(r.graph, r.guards) for r in records.log.graphs} == {(None, ())}
    records.log.clear()
    assert not records.log.graphs and not records.log.totals


def test_collect_is_of_its_own_context():
    with records.collect() as seen:
        thread = threading.Thread(target=contextvars.Context().run, args=(records.emit, GRAPH))
        thread.start()
        thread.join()
    assert not seen.graphs


def test_break_record_reads_as_one_line():
    record = BreakRecord(
        "branch-on-tensor", Place("f.py", 4, "f", "if x:"), "the condition is a tensor", "use where", "f"
    )
    assert str(record) == "[branch-on-tensor] at f.py:4 in f: if x:: the condition is a tensor; use where"
    kept = Records()
    kept.add(record)
    assert kept.breaks == [record]
