# SPDX-License-Identifier: Apache-2.0
"""A run of examples/fashion_mnist.py that is killed and started again, over and over; started by test_fashion_mnist.py.

The process imports everything once and trains nothing itself: every life of a run is a forked child, which kills itself
with SIGKILL at its n-th call of a Python function, wherever that is.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import fashion_mnist

RUN = ["--method", "RadaDamp, cooldown", "--seed", "3", "--epochs", "6", "--limit", "192", "--accelerator", "cpu"]
RUN += ["--batch-size", "32", "--max-batch-size", "64", "--threads", "1"]


def live(out: Path, last_call: int | None) -> tuple[bool, int]:
    """Train in a child up to its ``last_call``; return whether it was killed, and how many calls it made if not."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        calls = 0

        def count(frame: object, event: str, argument: object) -> None:
            nonlocal calls
            calls += event == "call"
            if calls == last_call:
                os.kill(os.getpid(), signal.SIGKILL)

        code = 1
        try:
            os.close(read)
            sys.setprofile(count)
            fashion_mnist.main(fashion_mnist.arguments([*RUN, "--resume", "--out", str(out)]))
            sys.setprofile(None)
            os.write(write, str(calls).encode())
            code = 0
        except BaseException:  # noqa: BLE001  # a fork must not return into the parent's code
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(write)
    told = os.read(read, 100)
    os.close(read)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status), int(told or 0)


def main() -> None:
    """Train without a kill, then with as many as asked for."""
    root, kills = Path(sys.argv[1]), int(sys.argv[2])
    draw = random.Random(int(sys.argv[3]))
    killed, calls = live(root / "uncut", None)
    assert not killed
    rows = []
    for _ in range(kills):
        # A call at or after the end of what is left of the run is none, and then the run is complete.
        killed, _ = live(root / "cut", draw.randrange(calls // 8, calls // 2))
        written = list((root / "cut").glob("*.csv"))
        if not killed:
            break
        rows.append(len(written[0].read_text().splitlines()) - 1 if written else 0)
    else:
        assert not live(root / "cut", None)[0]
    print(json.dumps({"calls": calls, "rows": rows}))  # noqa: T201


if __name__ == "__main__":
    main()
