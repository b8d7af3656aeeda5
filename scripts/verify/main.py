#!/usr/bin/env python3
"""Runs the parts of the check whose inputs have changed since they passed. scripts/verify.sh describes the options."""

import argparse
import os
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib import import_module
from pathlib import Path
from threading import Lock

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE), str(HERE / "parts"), str(HERE.parent / "ptxemu")]
sys.dont_write_bytecode = True

import records
from records import ROOT, Failed, Record

# Longest first, and alternating: a part that builds with cargo, then one that hardly does.
NAMES = [
    *["lavapipe", "emulate", "cuda", "vendors", "mutants", "web", "mesa26", "model", "ptx", "ranks", "differential", "window"],
    *["aarch64", "windows", "features", "burn", "fuzz", "benches", "frames", "long"],
]
LOGS = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "verify"

# How much output of a failed part is shown where others ran beside it.
LAST_LINES = 60


class State:
    """A part, its units as they are now, and which of them are to run."""

    def __init__(self, part, args):
        self.part, self.args = part, args
        self.inputs, self.recorded = part.units(), records.load(part.name)
        if not self.inputs:
            raise Failed(f"{part.name} has no units")
        self.tools = part.tools()
        self.gone = sorted(set(self.recorded) - set(self.inputs))
        self.stale = [unit for unit in self.inputs if args.fresh or args.full or self.why(unit)]
        self.seconds, self.cases, self.failed = 0, {}, []

    def digest(self, unit, traced):
        return self.part.digest(self.inputs[unit], traced)

    def why(self, unit):
        """Why a unit has to run, or None."""
        record = self.recorded.get(unit)
        if not record:
            return "never passed"
        changed = [f"{name} was {record.tools[name]}, is {version}" for name, version in self.tools.items() if record.tools.get(name, version) != version]
        if changed:
            return ", ".join(changed)
        try:
            return None if self.digest(unit, record.inputs) == record.digest else "inputs changed"
        except (OSError, LookupError, Failed) as error:
            return f"an input is gone: {error}"

    def run(self):
        """Runs what is stale, and records what passed."""
        begin, log = time.monotonic(), LOGS / f"{self.part.name}.log"
        # A unit whose inputs changed while the part ran has not passed.
        before = {unit: self.digest(unit, []) for unit in self.stale}
        with log.open("w") as file:
            passed = {}
            try:
                passed = self.part.run(list(self.stale), self.args.full, file)
            except Failed as error:
                file.write(f"\n{self.part.name}: {error}\n")
                passed = getattr(error, "passed", {})
            except Exception:
                file.write(traceback.format_exc())
            for unit in self.stale:
                if unit not in passed:
                    self.failed.append(unit)
                elif passed[unit].cases < 1:
                    file.write(f"\n{self.part.name}: {unit} passed without having run a case\n")
                    self.failed.append(unit)
        records.digest_of_file.cache_clear()
        tools = self.part.tools()
        for unit in set(self.stale) - set(self.failed):
            self.cases[unit] = passed[unit].cases
            if before[unit] == self.digest(unit, []):
                traced = sorted(passed[unit].inputs)
                self.recorded[unit] = Record(self.digest(unit, traced), tools, passed[unit].cases, traced)
        records.save(self.part.name, self.recorded)
        self.seconds = time.monotonic() - begin
        return log

    def line(self):
        late = self.seconds > self.part.minutes * 60 * (10 if self.args.full else 1)
        kept = len(self.inputs) - len(self.stale)
        cases = sum(self.cases.values()) + sum(self.recorded[unit].cases for unit in self.inputs if unit not in self.stale)
        what = "FAILED" if self.failed or self.gone else "well"
        return f"{self.part.name:10}{what:8}{self.seconds:6.0f} s of {self.part.minutes * 60:5} {len(self.stale):5} ran {kept:5} unchanged {cases:7} cases{'  LATE' if late else ''}"


def arguments():
    parser = argparse.ArgumentParser(prog="scripts/verify.sh")
    parser.add_argument("parts", nargs="*", metavar="PART", help=" ".join(NAMES))
    parser.add_argument("--fresh", action="store_true", help="run every unit, changed or not")
    parser.add_argument("--full", action="store_true", help="run every unit, and the slow suites whole (MLA_FULL=1): hours")
    parser.add_argument("--list", action="store_true", help="name the parts and what would run, and run nothing")
    parser.add_argument("--prune", action="store_true", help="drop the records of units that are not there any more, and run nothing")
    args = parser.parse_args()
    unknown = [name for name in args.parts if name not in NAMES]
    if unknown:
        parser.error(f"no part {' '.join(unknown)}; there are {' '.join(NAMES)}")
    args.parts = args.parts or NAMES
    return args


def show(states):
    for state in states:
        print(f"{state.part.name:10} {len(state.inputs):4} units, {len(state.stale):4} to run: {state.part.about}")
        for unit in state.stale:
            print(f"{'':11}{unit}: {state.why(unit) or 'as asked'}")
        for unit in state.gone:
            print(f"{'':11}{unit}: recorded, but not there any more, which is a failure: scripts/verify.sh --prune")


def prune(states):
    for state in states:
        for unit in state.gone:
            print(f"{state.part.name}: {unit} is not there any more")
        records.save(state.part.name, {unit: record for unit, record in state.recorded.items() if unit in state.inputs})


def run_all(states):
    """Two parts at a time: a single one leaves two cores partly idle while it links or waits for a test. Those that measure times come last."""
    run_some([state for state in states if not state.part.alone], 2, len(states) == 1)
    run_some([state for state in states if state.part.alone], 1, len(states) == 1)


def run_some(states, at_a_time, alone):
    begin, lock = time.monotonic(), Lock()
    pool = ThreadPoolExecutor(at_a_time)
    running = {}
    for state in states:
        if state.stale:
            def job(state=state):
                with lock:
                    print(f"verify.sh: {state.part.name}: {len(state.stale)} of {len(state.inputs)} units (after {time.monotonic() - begin:.0f} s)", flush=True)
                return state.run()
            running[pool.submit(job)] = state
        else:
            print(f"verify.sh: {state.part.name}: unchanged since it passed ({len(state.inputs)} units)")
    for done in as_completed(running):
        state, log = running[done], done.result()
        with lock:
            if state.failed or alone:
                said = log.read_text().splitlines()
                shown = said if alone else said[-LAST_LINES:]
                print(f"\n=== {state.part.name} (after {time.monotonic() - begin:.0f} s)", *shown, sep="\n")
            for unit in state.failed:
                print(f"verify.sh: {state.part.name}: {unit} FAILED: see {log}", flush=True)


def main():
    args = arguments()
    if args.full:
        os.environ["MLA_FULL"] = "1"
    LOGS.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    try:
        states = [State(import_module(name).PART, args) for name in args.parts]
    except Failed as error:
        sys.exit(f"verify.sh: {error}")
    if args.list:
        return show(states)
    if args.prune:
        return prune(states)
    run_all(states)
    print(f"\n=== after {time.monotonic() - begin:.0f} s")
    for state in states:
        print(state.line())
        for unit in state.gone:
            print(f"verify.sh: scripts/verified/{state.part.name}.tsv names {unit}, which is not there any more: scripts/verify.sh --prune")
    failed = [state.part.name for state in states if state.failed or state.gone]
    if failed:
        sys.exit(f"verify.sh: failed: {' '.join(failed)}")


if __name__ == "__main__":
    main()
