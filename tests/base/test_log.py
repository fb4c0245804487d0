"""Log lines: topics from the environment, warnings said once."""

import os
import subprocess
import sys

from kiln.base import log


def test_warn_once(caplog):
    log.forget()
    assert log.warn_once("key", "the message") and not log.warn_once("key", "the message")
    assert [r.message for r in caplog.records] == ["the message"]
    log.forget()
    assert log.warn_once("key", "the message")


def test_topics_come_from_the_environment():
    program = "from kiln.base import log; log.say('graph', 'g'); log.say('breaks', 'b'); print(log.wants('graph'))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={**os.environ, "KILN_LOG": "graphs, nonsense"},
    )
    assert done.stdout == "True\n"
    assert "[kiln] graph: g" in done.stderr and "breaks" not in done.stderr.splitlines()[-1]
    assert "unknown topics nonsense; known are all, breaks" in done.stderr
