"""A part of scripts/verify.sh, and helpers for its `run`."""

import os
import re
import subprocess
from dataclasses import dataclass, field

from records import ROOT, Failed, digest


@dataclass
class Passed:
    """A unit that passed: the cases that ran, and inputs that are known only after the run (see `Part.digest`)."""

    cases: int
    inputs: list = field(default_factory=list)


@dataclass
class Part:
    """A part of the check.

    `units()` gives the inputs of each unit by its name, in under a second and without any tool; see `records.digest`.
    `tools()` gives the versions of the tools that are installed here, which must not install any.
    `alone`: it measures times, so nothing runs beside it.
    `run(stale, full, log)` runs units and returns `Passed` by unit; a unit that it leaves out has failed, and the log says why.
    """

    name: str
    about: str
    minutes: int
    units: object
    run: object
    tools: object = dict
    alone: bool = False

    def digest(self, inputs, traced):
        """The digest of a unit whose run named further inputs: paths, which may have an entry behind a `:`."""
        return digest(inputs)


def run(log, *command, env=None, minutes=60):
    """Runs a command in the repository's root; its output goes to the log. Returns its status and output."""
    log.write(f"\n$ {' '.join(map(str, command))}\n")
    log.flush()
    said = []
    process = subprocess.Popen(
        ["timeout", f"{minutes}m", *map(str, command)], cwd=ROOT, env=os.environ | (env or {}),
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
    )
    for line in process.stdout:
        said.append(line)
        log.write(line)
        log.flush()
    status = process.wait()
    if status == 124:
        log.write(f"not done within {minutes} minutes\n")
    return status, "".join(said)


def must(log, *command, **options):
    """As `run`, but a failure fails the part."""
    status, said = run(log, *command, **options)
    if status:
        raise Failed(f"status {status} of {' '.join(map(str, command))}")
    return said


def tests_in(said):
    """How many tests passed by a runner's closing lines."""
    return sum(int(count) for count in re.findall(r"^test result: ok\. (\d+) passed", said, re.M))


def version_of(command, pattern=r"(\d+(?:\.\d+)+\S*)"):
    """The version that an installed tool prints, or None."""
    try:
        said = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    found = re.search(pattern, said)
    return found and found[1]


def versions(**commands):
    """The versions of tools by name, without those that are not installed."""
    found = {name: version_of(command) for name, command in commands.items()}
    return {name: version for name, version in found.items() if version}


RUSTC = ["rustc", "--version"]


def locked(*names):
    """Versions in Cargo.lock, as inputs of a digest."""
    text = (ROOT / "Cargo.lock").read_text()
    return [(name, " ".join(re.findall(rf'^name = "{name}"\nversion = "([^"]+)"', text, re.M))) for name in names]
