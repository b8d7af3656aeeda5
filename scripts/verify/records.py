"""Records of what passed on which inputs: one file a part, scripts/verified/PART.tsv, a line a unit.

    unit <TAB> digest of its inputs <TAB> versions of tools <TAB> cases that ran [<TAB> inputs that are known only after a run]

A unit is the smallest thing that a part can run: a kernel, a test, or the whole part. It is skipped while its digest, and the version
of every installed tool, equal the recorded ones. Only scripts/verify.sh writes these files, after a pass.
"""

import hashlib
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECORDS = ROOT / "scripts/verified"
HEADER = "# Written by scripts/verify.sh when a unit passes, never by hand: unit, digest of its inputs, tools, cases[, inputs].\n"


class Failed(Exception):
    """A part, or a unit of it, did not pass; the message says why and what to do."""


@cache
def digest_of_file(path):
    return hashlib.sha256((ROOT / path).read_bytes()).hexdigest()


def files(*patterns):
    """Paths, relative to the root and sorted, of files and globs (`src/**/*.rs`). One that matches nothing is a mistake."""
    found = set()
    for pattern in patterns:
        some = {path.relative_to(ROOT).as_posix() for path in ROOT.glob(pattern) if path.is_file() and "__pycache__" not in path.parts}
        if not some:
            raise Failed(f"no file matches {pattern}: scripts/verify names an input that is not there")
        found |= some
    return sorted(found)


def digest(inputs):
    """One digest of files (paths relative to the root) and of pairs (name, text)."""
    lines = []
    for item in inputs:
        name, value = (item[0], hashlib.sha256(item[1].encode()).hexdigest()) if isinstance(item, tuple) else (item, digest_of_file(item))
        lines.append(f"{name} {value}")
    return hashlib.sha256("\n".join(sorted(set(lines))).encode()).hexdigest()[:32]


@dataclass
class Record:
    """A line of a record file."""

    digest: str
    tools: dict
    cases: int
    inputs: list = field(default_factory=list)


def load(part):
    """The records of a part by unit; none if it has never passed."""
    path, found = RECORDS / f"{part}.tsv", {}
    for line in path.read_text().splitlines() if path.exists() else ():
        if line and not line.startswith("#"):
            unit, digest, tools, cases, *inputs = line.split("\t")
            pairs = dict(pair.split("=", 1) for pair in tools.split("; ") if pair)
            found[unit] = Record(digest, pairs, int(cases), inputs[0].split(" ") if inputs and inputs[0] else [])
    return found


def save(part, records):
    """Writes the records of a part, sorted by unit."""
    lines = []
    for unit, record in sorted(records.items()):
        tools = "; ".join(f"{name}={version}" for name, version in sorted(record.tools.items()))
        line = [unit, record.digest, tools, str(record.cases)]
        lines.append("\t".join([*line, " ".join(record.inputs)] if record.inputs else line) + "\n")
    RECORDS.mkdir(exist_ok=True)
    (RECORDS / f"{part}.tsv").write_text(HEADER + "".join(lines))
