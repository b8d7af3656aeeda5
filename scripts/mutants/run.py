#!/usr/bin/env python3
"""Runs mutants: scripts/mutants.sh describes the options, table.py the mutants.

A mutant of WGSL is written into a copy of the test program (shaders.py); those of Rust are all in one build, each behind a switch
(rust.py); one of CUDA is a PTX text that the emulated card takes (cuda.py). Each test must pass without a mutant, and must run and
fail with it: a shader or a kernel that does not compile, a program that dies or hangs, and a test that was not run are mistakes of the
table, not catches.
"""

import argparse
import errno
import json
import os
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.dont_write_bytecode = True
import cuda
import rust
import shaders
import table
from table import ROOT, Wrong

TARGET = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")).resolve()
FOLDER = TARGET / "mutants"
# The emulated card interprets its kernels.
SECONDS = {"card": 1200}
USUAL_SECONDS = 300
# What scripts/check.sh builds, so that the dependencies are there.
CRATES = ["-p", "wgpu-mla", "-p", "wgpu-mla-ptx", "-p", "context_parallel", "--features", "cuda"]
# A shader that is no WGSL says nothing of the test, nor does PTX that the interpreter does not know.
NO_KERNEL = re.compile(r"[Ss]hader validation error|[Ss]hader '.*' parsing error|not known to the interpreter")


# These are of the crate itself, the others of examples/generate. `card` is `it` on the emulated card.
OURS = ("it", "lib", "card")


def built(tree, programs):
    """Test programs by name, of a tree."""
    wanted = {}
    ours = [name for name in programs if name in OURS]
    theirs = [name for name in programs if name not in OURS]
    if ours:
        wanted |= programs_of(tree, [*CRATES, "--lib", "--test", "it"], "wgpu_mla")
    if theirs:
        wanted |= programs_of(tree, ["-p", "generate", "--features", "cuda", "--lib", *(word for name in theirs for word in ("--test", name))], "")
    return {name: wanted["it" if name == "card" else name] for name in programs}


def programs_of(tree, arguments, lib):
    command = ["cargo", "test", "--locked", "--no-run", "--message-format", "json-render-diagnostics", *arguments]
    done = subprocess.run(command, cwd=tree, env=os.environ | {"CARGO_TARGET_DIR": str(TARGET)}, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise Wrong(f"no build of {tree}: {' '.join(command)}")
    found = {}
    for line in done.stdout.splitlines():
        said = json.loads(line)
        if said.get("executable") and said["profile"]["test"]:
            name, kind = said["target"]["name"], said["target"]["kind"]
            found["lib" if "lib" in kind and name == lib else name] = Path(said["executable"])
    return found


def home_of(program, tree):
    """Where cargo runs a test program."""
    return tree if program in OURS else tree / "examples/generate"


class Outcome:
    """How the tests of a run ended, by their names."""

    def __init__(self, status, said):
        self.status, self.said = status, said
        self.tests = dict(re.findall(r"^test (\S+)\s+\.\.\. (ok|FAILED|ignored)", said, re.M))


def run(command, cwd, env, seconds):
    env = {name: value for name, value in (os.environ | env).items() if value is not None}
    for _ in range(20):
        try:
            done = subprocess.run(
                [*map(str, command)], cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                text=True, errors="replace", timeout=seconds,
            )
            return Outcome(done.returncode, done.stdout)
        except subprocess.TimeoutExpired as late:
            return Outcome(124, (late.stdout or b"").decode(errors="replace"))
        except OSError as error:
            # Another thread forked while the program was being written.
            if error.errno != errno.ETXTBSY:
                raise
            time.sleep(0.1)
    raise Wrong(f"{command[0]} stays busy")


def seconds_of(mutant):
    return SECONDS.get(mutant.program, USUAL_SECONDS)


class Runner:
    def __init__(self, mutants):
        self.mutants, self.tree = mutants, FOLDER / "tree"
        self.numbers = {one.id: number for number, one in enumerate(one for one in table.load().values() if one.kind == "rust")}
        self.local = threading.local()

    def build(self):
        FOLDER.mkdir(parents=True, exist_ok=True)
        of_rust = [mutant for mutant in self.mutants if mutant.kind == "rust"]
        others = {mutant.program for mutant in self.mutants if mutant.kind != "rust"}
        self.own, self.switched = built(ROOT, sorted(others)), {}
        if of_rust:
            # All of them, so that the copy is the same whatever is asked for.
            rust.copy(self.tree, [(self.numbers[one.id], one) for one in table.load().values() if one.kind == "rust"])
            self.switched = built(self.tree, sorted({mutant.program for mutant in of_rust}))
        if any(mutant.program == "card" for mutant in self.mutants):
            subprocess.run(["scripts/ptx.sh", "suite", "--no-run"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        self.bytes = {name: path.read_bytes() for name, path in self.own.items()}

    def environment(self, mutant):
        more = dict(pair.split("=", 1) for pair in mutant.env.split())
        if mutant.program == "card":
            # `scripts/ptx.sh suite` does the same, and has built the driver.
            python, driver = TARGET / "cuda/venv/bin/python", TARGET / "cuda_driver/debug"
            more |= {"LD_LIBRARY_PATH": str(driver), "MLA_PYTHON": str(python), "MLA_REQUIRE_CUDA": "1"}
        return {"MLA_CHECKED_SHADERS": None if mutant.shipped else "1", "MLA_MUTANT": None} | more

    def command(self, mutant, program=None):
        return [program or (self.switched if mutant.kind == "rust" else self.own)[mutant.program], "--exact", mutant.test]

    def home(self, mutant):
        return home_of(mutant.program, self.tree if mutant.kind == "rust" else ROOT)

    def without(self, mutant):
        """Whether the test passes as it should; a sentence if not."""
        outcome = run(self.command(mutant), self.home(mutant), self.environment(mutant), seconds_of(mutant))
        how = outcome.tests.get(mutant.test, "not run")
        return None if how == "ok" else f"without the mutant, {mutant.test} is {how}\n{outcome.said[-3000:]}"

    def with_it(self, mutant):
        env, seconds = self.environment(mutant), seconds_of(mutant)
        if mutant.kind == "rust":
            return run(self.command(mutant), self.home(mutant), env | {"MLA_MUTANT": str(self.numbers[mutant.id])}, seconds)
        if mutant.kind == "cuda":
            ptx = cuda.compiled(mutant, FOLDER / "cuda" / mutant.id)
            return run(self.command(mutant), ROOT, env | {"MLA_EMULATED_PTX": str(ptx)}, seconds)
        program = FOLDER / f"{mutant.program}-{threading.get_ident()}"
        program.write_bytes(shaders.patched(self.bytes[mutant.program], mutant))
        program.chmod(0o755)
        try:
            return run(self.command(mutant, program), self.home(mutant), env, seconds)
        finally:
            program.unlink()

    def verdict(self, mutant):
        """`caught`, `lives`, or what kept it from being tried."""
        try:
            outcome = self.with_it(mutant)
        except (Wrong, subprocess.CalledProcessError) as error:
            return f"not tried: {error}", ""
        how = outcome.tests.get(mutant.test)
        if outcome.status == 124:
            return f"not tried: no end within {seconds_of(mutant)} s", outcome.said
        if NO_KERNEL.search(outcome.said):
            return "not tried: the kernel does not compile", outcome.said
        if how not in ("ok", "FAILED"):
            return f"not tried: the test was not run to its end (status {outcome.status})", outcome.said
        return ("lives" if how == "ok" else "caught"), outcome.said


def arguments(all_mutants):
    parser = argparse.ArgumentParser(prog="scripts/mutants.sh")
    parser.add_argument("ids", nargs="*", metavar="ID")
    parser.add_argument("--file", nargs="+", default=[], help="those of these files")
    parser.add_argument("--list", action="store_true", help="names them, and runs nothing")
    parser.add_argument("--report", type=Path, default=Path(os.devnull), help="a line for each that went as it should")
    args = parser.parse_args()
    if unknown := [id for id in args.ids if id not in all_mutants] + [name for name in args.file if not any(one.file == name for one in all_mutants.values())]:
        parser.error(f"no mutant {' '.join(unknown)}: --list names them")
    args.chosen = [one for one in all_mutants.values() if not (args.ids or args.file) or one.id in args.ids or one.file in args.file]
    return args


def main():
    args = arguments(table.load())
    if args.list:
        for one in args.chosen:
            print(f"{one.id:28} {one.file}: {one.why}")
        return 0
    runner = Runner(args.chosen)
    runner.build()
    bad, lock = [], threading.Lock()
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool, args.report.open("w") as report:
        # Each test once without any.
        def key(one):
            return one.caught_by, one.shipped, one.env, one.kind == "rust"

        tests = {key(one): one for one in args.chosen}
        fine = {}
        for one, wrong in zip(tests.values(), pool.map(runner.without, tests.values())):
            fine[key(one)] = not wrong
            if wrong:
                print(f"{one.id}: {wrong}", flush=True)
        bad += [one.id for one in args.chosen if not fine[key(one)]]

        def job(one):
            begin = time.monotonic()
            verdict, said = runner.verdict(one)
            is_well = verdict == ("lives" if one.lives else "caught")
            with lock:
                print(f"{'' if is_well else 'WRONG: '}{verdict:8}{time.monotonic() - begin:6.1f} s  {one.id}: {one.test}", flush=True)
                if is_well:
                    report.write(f"{one.id}\n")
                    report.flush()
                else:
                    bad.append(one.id)
                    if verdict.startswith("not tried"):
                        print(said[-3000:], flush=True)

        list(pool.map(job, [one for one in args.chosen if fine[key(one)]]))
    argued = sum(1 for one in args.chosen if one.lives)
    print(f"mutants: {len(args.chosen) - len(bad) - argued} caught, {argued} that no test can tell, {len(bad)} wrong{': ' if bad else ''}{' '.join(bad)}")
    return 1 if bad else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Wrong as error:
        sys.exit(f"mutants: {error}")
