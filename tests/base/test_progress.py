"""Progress: a bar for a person at a terminal, lines in a log, silence for short work and on request."""

import logging
from time import perf_counter, sleep

import pytest

from kiln.base import progress
from kiln.base.progress import watched, working


class Bar:
    def __init__(self):
        self.seen, self.stopped = [], False

    def update(self, task, description, total, completed):
        self.seen.append((description, completed, total))

    def stop(self):
        self.stopped = True


@pytest.fixture
def bars(monkeypatch):
    """The bars that are drawn on a terminal where work is shown after a moment."""
    made = []

    def started(title):
        made.append(Bar())
        return made[-1], 0

    monkeypatch.setattr(progress, "started", started)
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(progress, "PATIENCE", 0.01)
    monkeypatch.setattr(progress, "PAUSE", 0.001)
    return made


def until(condition):
    end = perf_counter() + 10
    while not condition() and perf_counter() < end:
        sleep(0.001)
    return condition()


def test_a_bar_names_the_innermost_work_and_goes_when_it_ends(bars):
    with working("capturing f"):
        assert until(lambda: bars and ("capturing f", 0, None) in bars[0].seen)
        for item in watched([1, 2], "timing kernels of f"):
            assert until(lambda item=item: ("timing kernels of f", item - 1, 2) in bars[0].seen)
    assert until(lambda: bars[0].stopped) and len(bars) == 1


def test_short_work_and_a_silenced_one_show_nothing(bars, monkeypatch, caplog):
    with caplog.at_level(logging.INFO, logger="kiln"):
        monkeypatch.setattr(progress, "PATIENCE", 60.0)
        assert list(watched([1, 2], "timing")) == [1, 2]
        monkeypatch.setattr(progress, "PATIENCE", 0.0)
        monkeypatch.setenv("KILN_PROGRESS", "0")
        with working("capturing f"):
            sleep(0.02)
        monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: False, raising=False)
        with working("capturing f"):
            sleep(0.02)
    assert not bars and not caplog.records


def test_without_a_terminal_long_work_is_a_line_of_the_log(monkeypatch, caplog):
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: False, raising=False)
    with caplog.at_level(logging.INFO, logger="kiln"):
        with working("generating code for f"):
            pass
        monkeypatch.setattr(progress, "PATIENCE", 0.0)
        with working("generating code for g"):
            sleep(0.001)
    assert [record.getMessage() for record in caplog.records] == ["generating code for g took 0.0 s"]
