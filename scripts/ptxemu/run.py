#!/usr/bin/env python3
"""Runs the tests of the interpreter (tests/test_*.py) and those of the kernels (kernels_*.py) on it.

    run.py [NAME...]      all, or those whose `module.test` contains a name; MLA_FULL=1: long ones too, and modules may do more

A test is a function `test_*` without arguments; it fails by raising. scripts/ptx.sh emulate calls this with the right
Python. As many run at a time as there are cores, in processes of their own.
"""

import os
import sys
import time
import traceback

# One thread each: the matrices are tiny. numpy reads this when it is imported.
os.environ["OPENBLAS_NUM_THREADS"] = "1"
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib import import_module
from pathlib import Path

HERE = Path(__file__).resolve().parent


def modules():
    """The interpreter's own tests come first: what they find explains what the kernels' find."""
    sys.path += [str(HERE), str(HERE / "tests")]
    paths = sorted((HERE / "tests").glob("test_*.py")) + sorted(HERE.glob("kernels_*.py"))
    return [import_module(path.stem) for path in paths]


def found(wanted):
    tests = {(module.__name__, name): test for module in modules() for name, test in vars(module).items() if name.startswith("test_")}
    tests = {place: test for place, test in tests.items() if not wanted or any(part in ".".join(place) for part in wanted)}
    full = import_module("launch").FULL
    return [place for place, test in tests.items() if full or not hasattr(test, "long")]


def run(module, name):
    """Seconds, and the trace of a failure or None."""
    begin, trace = time.monotonic(), None
    try:
        getattr(import_module(module), name)()
    except Exception:
        trace = traceback.format_exc()
    return time.monotonic() - begin, trace


def main():
    tests = found(sys.argv[1:])
    failed = 0
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        running = {pool.submit(run, *test): ".".join(test) for test in tests}
        for done in as_completed(running):
            seconds, trace = done.result()
            failed += trace is not None
            print(f"{'FAILED' if trace else 'ok':7}{seconds:6.1f} s  {running[done]}", flush=True)
            if trace:
                print(trace, flush=True)
    print(f"emulate: {len(tests) - failed} passed, {failed} failed")
    return 1 if failed or not tests else 0


if __name__ == "__main__":
    sys.exit(main())
