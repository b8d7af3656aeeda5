#!/usr/bin/env python3
"""Runs the tests of the interpreter (tests/test_*.py) and those of the kernels (kernels_*.py) on it.

    run.py [NAME...]              all, or those whose `module.test` contains a name; MLA_FULL=1: long ones too, and modules may do more
    run.py --exact --report FILE NAME...    those of exactly these names; a line of FILE for each that passed: its name, a tab,
                                  and what it read of the PTX files (`PATH:ENTRY`, `PATH:` for the list of entries), with spaces

A test is a function `test_*` without arguments; it fails by raising. scripts/ptx.sh emulate calls this with the right
Python. As many run at a time as there are cores, in processes of their own.
"""

import argparse
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


def found(wanted, exact):
    tests = {(module.__name__, name): test for module in modules() for name, test in vars(module).items() if name.startswith("test_")}
    fits = (lambda name: name in wanted) if exact else (lambda name: not wanted or any(part in name for part in wanted))
    tests = {place: test for place, test in tests.items() if fits(".".join(place))}
    full = import_module("launch").FULL
    return [place for place, test in tests.items() if full or not hasattr(test, "long")]


def run(module, name):
    """Seconds, the trace of a failure or None, and what was read."""
    begin, trace, read = time.monotonic(), None, import_module("launch").TRACED
    read.clear()
    try:
        getattr(import_module(module), name)()
    except Exception:
        trace = traceback.format_exc()
    return time.monotonic() - begin, trace, sorted(read)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--report", type=Path, default=Path(os.devnull))
    args = parser.parse_args()
    tests = found(args.names, args.exact)
    failed = 0
    with args.report.open("w") as report, ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        running = {pool.submit(run, *test): ".".join(test) for test in tests}
        for done in as_completed(running):
            seconds, trace, read = done.result()
            failed += trace is not None
            print(f"{'FAILED' if trace else 'ok':7}{seconds:6.1f} s  {running[done]}", flush=True)
            if trace:
                print(trace, flush=True)
            else:
                report.write(f"{running[done]}\t{' '.join(read)}\n")
                report.flush()
    print(f"emulate: {len(tests) - failed} passed, {failed} failed")
    return 1 if failed or not tests else 0


if __name__ == "__main__":
    sys.exit(main())
