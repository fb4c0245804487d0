"""What `import kiln`, and its first use, add to `import torch`, in CPU seconds, in fresh processes.

Their modules come from bytecode caches, as those of an installed package do, whatever the environment says.

python benchmarks/import_time.py
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time

from common import fresh, verdict

STATEMENTS = {
    "kiln": "import kiln",
    "kiln.compile": "import kiln; kiln.compile",
    "torch._dynamo": "import torch._dynamo",
}


def measure(name: str) -> None:
    import torch  # noqa: F401

    start = time.process_time()
    exec(STATEMENTS[name], {})
    print(json.dumps(time.process_time() - start))


def main() -> None:
    seconds: dict[str, list[float]] = {name: [] for name in STATEMENTS}
    with tempfile.TemporaryDirectory() as caches:
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = caches
        for turn in range(6):
            for name in STATEMENTS:
                measured = fresh(__file__, name)
                if turn:  # the first fills the caches
                    seconds[name].append(measured)
    for name, values in seconds.items():
        print(f"import {name:16}{statistics.median(values):8.3f} s CPU after import torch")
    print(verdict("import kiln, s", statistics.median(seconds["kiln"]), 0.15))


if __name__ == "__main__":
    measure(sys.argv[1]) if len(sys.argv) > 1 else main()
