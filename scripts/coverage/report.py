"""Reads what `llvm-cov export` says of src: report.py JSON prints the share of regions that ran, report.py JSON FILE... what did not."""

import json
import re
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# These need a card, or two.
LEFT_OUT = re.compile(r"src/cuda\b|src/communicator/nccl\b")
CODE = 0


def end_of_code(path):
    """The line of a file where its tests begin, which come last."""
    lines = (ROOT / path).read_text().splitlines()
    for at, line in enumerate(lines[:-1]):
        if re.match(r"#\[cfg\((all\()?test\b", line) and re.match(r"(pub\S* )?mod \w+ \{", lines[at + 1]):
            return at
    return len(lines)


def is_test(path):
    return path.endswith(("_test.rs", "/tests.rs")) or "/tests/" in path


def regions(export):
    """By file, by place: how often a region ran, in the function that ran it most often of those made of one generic."""
    found = defaultdict(dict)
    for function in export["data"][0]["functions"]:
        names = [str(Path(name).relative_to(ROOT)) if name.startswith(f"{ROOT}/") else name for name in function["filenames"]]
        for *place, count, file, _, kind in function["regions"]:
            path = names[file]
            if kind == CODE and path.startswith("src/") and not LEFT_OUT.match(path) and not is_test(path):
                found[path][tuple(place)] = max(count, found[path].get(tuple(place), 0))
    for path, places in found.items():
        end = end_of_code(path)
        found[path] = {place: count for place, count in places.items() if place[0] <= end}
    return {path: places for path, places in sorted(found.items()) if places}


def share(counts):
    ran = sum(count > 0 for count in counts)
    return f"{100 * ran / len(counts):5.1f} % of {len(counts):5} regions, {len(counts) - ran:4} not run"


def print_missed(path, places):
    lines = (ROOT / path).read_text().splitlines()
    for line, column, to_line, to_column in sorted(place for place, count in places.items() if not count):
        code = lines[line - 1][column - 1 : to_column - 1 if line == to_line else None]
        print(f"{path}:{line}:{column} to {to_line}:{to_column}: {code.strip()}")


def main():
    found = regions(json.loads(Path(sys.argv[1]).read_text()))
    if sys.argv[2:]:
        for path in sys.argv[2:]:
            print_missed(path, found[path])
        return
    for path, places in sorted(found.items(), key=lambda one: -sum(not count for count in one[1].values())):
        print(f"{share(places.values())}  {path}")
    print(f"{share([count for places in found.values() for count in places.values()])}  in all of src, without src/cuda and NCCL")


main()
