"""Log lines: one logger, the topics chosen by KILN_LOG, and warnings that are said once."""

from __future__ import annotations

import logging
import os
import threading

logger = logging.getLogger("kiln")

TOPICS = ("breaks", "cache", "code", "graph", "guards", "kernels", "llvm", "plan", "recompiles", "time")
#: Other names of topics.
ALSO = {"fallbacks": "breaks", "graphs": "graph", "loops": "kernels", "times": "time"}

_said: set[object] = set()
_lock = threading.Lock()


def _chosen(text: str) -> frozenset[str]:
    asked = [name.strip() for name in text.split(",") if name.strip()]
    names = frozenset(ALSO.get(name, name) for name in asked)
    if "all" in names:
        return frozenset(TOPICS)
    strange = names - frozenset(TOPICS)
    if strange:
        known = ", ".join(("all", *TOPICS))
        logger.warning("KILN_LOG: unknown topics %s; known are %s", ", ".join(sorted(strange)), known)
    return names & frozenset(TOPICS)


topics = _chosen(os.environ.get("KILN_LOG", ""))
"""The topics that KILN_LOG asks for, e.g. KILN_LOG=graph,breaks."""

if topics:
    logger.setLevel(logging.INFO)
    if not logger.handlers:
        _handler = logging.StreamHandler()
        _handler.setFormatter(logging.Formatter("[kiln] %(message)s"))
        logger.addHandler(_handler)
        logger.propagate = False


def say(topic: str, text: str) -> None:
    """Write one line when its topic was asked for; make costly text only under `wants(topic)`."""
    if topic in topics:
        logger.info("%s: %s", topic, text)


def wants(topic: str) -> bool:
    """Whether KILN_LOG asks for a topic."""
    return topic in topics


def warn(text: str) -> None:
    """Write a warning."""
    logger.warning("%s", text)


def warn_once(key: object, text: str) -> bool:
    """Write a warning the first time the key is seen; tells whether it was written."""
    with _lock:
        if key in _said:
            return False
        _said.add(key)
    logger.warning("%s", text)
    return True


def forget() -> None:
    """Let every `warn_once` speak again."""
    with _lock:
        _said.clear()
