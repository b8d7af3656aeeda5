#!/usr/bin/env python3
"""Compiles and checks the kernels. Called by scripts/ptx.sh, whose header describes the options.

    build.py [--check [--only NAME... | --list]] [--code FILE] [--crate DIRECTORY] [--report DIRECTORY]
"""

import argparse
import difflib
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import assembler
import cache
import manifest
import report
import sources
from compiler import constants, entries, normal

STATIC_SHARED = 48 * 1024
REGISTERS_OF_A_BLOCK = 64 * 1024
# The most shared memory of a block, on the cards that have most.
MOST_SHARED = 232448
# The same on those that have less.
SHARED_OF_A_CARD = {"sm_80": 166912, "sm_86": 101376, "sm_89": 101376, "sm_120": 101376}


def sources_in(kernels, only=()):
    """All sources, or those whose stems are named, by their stems: PTX files and modules have the same."""
    paths = sorted(kernels.glob("**/*.cu"), key=lambda path: path.stem)
    if len({path.stem for path in paths}) < len(paths):
        raise sources.Wrong(f"two of {kernels}/**/*.cu have one name")
    return [sources.read(path, kernels) for path in paths if path.stem in only or not only]


def compiled(pool, kernels, only):
    """Triples of (source, arch, PTX text) in order, of all sources or of those whose stems are named."""
    found = sources_in(kernels, only)
    if not found:
        raise sources.Wrong(f"no kernels: {kernels}/**/*.cu")
    pairs = [(source, arch) for source in found for arch in source.archs]
    texts = pool.map(lambda pair: cache.nvcc(pair[0].path, pair[1], kernels), pairs)
    return [(source, arch, normal(text, source.path.name, arch)) for (source, arch), text in zip(pairs, texts)]


def declared(ptxs):
    """Complaints about limits that are missing, not what the PTX says or, given all sources, of no entry."""
    wrong, used, known = [], set(), set()
    for source, arch, text in ptxs:
        known |= {(limits.file, entry) for entry, limits in source.limits.items()}
        for entry, threads in entries(text).items():
            found = source.limits_of(entry)
            if not found:
                wrong.append(f"{source.path.name}: no line `// limits: {entry} registers=N threads=N`")
                continue
            name, limits = found
            used.add((limits.file, name))
            if threads != limits.threads:
                wrong.append(f"{source.path.name}: {entry} has __launch_bounds__({threads}), limits say {limits.threads}")
    return wrong + [f"{file}: limits of {entry}, which it does not have" for file, entry in sorted(known - used)]


def excess(limits, usage, target):
    """Complaints about an entry's resources. Spills on a card that cannot launch it do not count."""
    launches = max(usage.dynamic, limits.card if limits else 0) <= SHARED_OF_A_CARD.get(target, MOST_SHARED)
    allowed = limits.spills if limits else 0
    checks = [
        (usage.spills <= allowed or not launches, f"spills {usage.spills} bytes"),
        (usage.stack <= allowed or not launches, f"has a stack frame of {usage.stack} bytes"),
        (usage.static <= STATIC_SHARED, f"takes {usage.static} bytes of static shared memory, over {STATIC_SHARED}"),
    ]
    if limits:
        checks.append((usage.registers <= limits.registers, f"takes {usage.registers} registers, over {limits.registers}"))
        # They are given in eights.
        block = (usage.registers + 7) // 8 * 8 * limits.threads
        checks.append((usage.dynamic <= (limits.shared or MOST_SHARED), f"asks for {usage.dynamic} bytes of dynamic shared memory"))
        checks.append((block <= REGISTERS_OF_A_BLOCK, f"takes {block} registers a block, over {REGISTERS_OF_A_BLOCK}"))
    return [what for fine, what in checks if not fine]


def assembled(pool, ptxs):
    """Runs every assembler. Returns the report's table and complaints."""
    jobs = [job for ptx in ptxs for job in assembler.jobs_of(*ptx)]
    table, where = {}, {}
    for job, (usages, complaints) in zip(jobs, pool.map(assembler.assemble, jobs)):
        for what in complaints:
            where.setdefault(f"{job.source.output(job.arch)}: {what}", []).append(job.place)
        shared = constants(job.ptx, "shared_bytes")
        for name, usage in sorted(usages.items()):
            key, found = (job.source.output(job.arch), name), job.source.limits_of(name)
            limits = found and found[1]
            usage.dynamic = shared.get(name, limits.shared if limits else 0)
            for what in excess(limits, usage, job.target):
                where.setdefault(f"{key[0]}: {name} {what}", []).append(job.place)
            if limits:
                table.setdefault(key, (limits, {}))[1][(job.assembler.name, job.target)] = usage
    print(f"ptx: {len(ptxs)} files, {len(table)} entries, assembled {len(jobs)} times")
    return dict(sorted(table.items())), [f"{what} ({', '.join(places)})" for what, places in where.items()]


def compare(path, text):
    """A complaint with the first lines that differ, or none."""
    if not path.exists():
        return [f"{path} is missing: run scripts/ptx.sh and commit it"]
    old = path.read_text()
    if old == text:
        return []
    lines = [line for line in difflib.unified_diff(old.splitlines(), text.splitlines(), "committed", "compiled", n=0, lineterm="")]
    shown = "\n    ".join(line[:200] for line in lines[:12])
    return [f"{path} differs in {len(lines) - 2} lines: run scripts/ptx.sh and commit it\n    {shown}"]


def rows_of(path, files):
    """The lines of a committed report that are about some PTX files."""
    rows = [line.removeprefix("| ") for line in path.read_text().splitlines()]
    return [row for row in rows if row.split("\t")[0].split(" |")[0] in files]


def check_some(args, ptxs, table, wrong):
    """--check of some sources: their files and their lines of the reports. Prints each that passed."""
    status = 0
    for source in {source.path: source for source, _, _ in ptxs}.values():
        compiled = {source.output(arch): text for other, arch, text in ptxs if other is source}
        own = {key: value for key, value in table.items() if key[0] in compiled}
        complaints = [line for line in wrong if re.search(rf"\b{re.escape(source.path.stem)}\.(ptx|cu|compute_\w+)\b", line)]
        for name, text in compiled.items():
            complaints += compare(args.ptx / name, text)
        for path, text in ((args.report / "ptx.md", report.markdown(own)), (args.report / "ptx.tsv", report.tsv(own))):
            rows = [line.removeprefix("| ") for line in text.splitlines() if line.removeprefix("| ").startswith(tuple(compiled))]
            if rows != rows_of(path, compiled):
                complaints.append(f"{path} disagrees about {source.path.name}: run scripts/ptx.sh and commit it")
        if not complaints and not all(manifest.has(args.manifest, args.kernels, *ptx, own) for ptx in ptxs if ptx[0] is source):
            complaints.append(f"{args.manifest} disagrees about {source.path.name}: run scripts/ptx.sh and commit it")
        for line in complaints:
            print(f"ptx: {line}", file=sys.stderr)
        if not complaints:
            print(f"ptx: {source.path.stem} passed: {len(own)} entries, assembled {sum(len(results) for _, results in own.values())} times")
        status |= bool(complaints)
    return status


def check_list(args):
    """Checks that each source has its PTX files and that there are no others, that the reports name all entries, and that the manifest
    agrees with both. Compiles nothing."""
    expected, ptxs = {}, []
    for source in sources_in(args.kernels):
        for arch in source.archs:
            ptx = args.ptx / source.output(arch)
            text = ptx.read_text() if ptx.exists() else ""
            ptxs.append((source, arch, text))
            expected[ptx.name] = list(entries(text))
    wrong = list(dict.fromkeys(declared(ptxs)))
    there = {path.name for path in args.ptx.iterdir()}
    wrong += [f"{name} has no source, or is missing: run scripts/ptx.sh" for name in sorted(there ^ set(expected))]
    pairs = {(file, entry) for file, names in expected.items() for entry in names}
    for path, pattern in ((args.report / "ptx.md", r"^\| (\S+\.ptx) \| (\w+) \|"), (args.report / "ptx.tsv", r"^(\S+\.ptx)\t(\w+)\t")):
        told = set(re.findall(pattern, path.read_text(), re.M))
        wrong += [f"{path}: {file} {entry} is in only one of the report and the PTX" for file, entry in sorted(told ^ pairs)]
    if not wrong:
        table = report.read_tsv(args.report / "ptx.tsv", {source.output(arch): source for source, arch, _ in ptxs})
        wrong = compare(args.manifest, manifest.text(args.kernels, ptxs, table))
    for line in wrong:
        print(f"ptx: {line}", file=sys.stderr)
    print(f"ptx: {len(pairs)} entries are reported")
    return 1 if wrong else 0


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--code", type=Path)
    parser.add_argument("--crate", type=Path, default=Path("shaders/cuda"))
    parser.add_argument("--report", type=Path, default=Path("benches/results"))
    args = parser.parse_args()
    if (args.only or args.list) and not args.check:
        parser.error("--only and --list belong to --check")
    args.kernels, args.ptx, args.manifest = args.crate / "kernels", args.crate / "ptx", args.crate / "src/manifest.rs"
    if args.list:
        return check_list(args)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        ptxs = compiled(pool, args.kernels, args.only)
        table, wrong = assembled(pool, ptxs)
    if args.code:
        args.code.write_text(report.digests(table))
    if args.only:
        return check_some(args, ptxs, table, [*dict.fromkeys(declared(ptxs)), *wrong])
    wrong = list(dict.fromkeys(declared(ptxs))) + wrong

    files = {args.ptx / source.output(arch): text for source, arch, text in ptxs}
    stale = [path for path in sorted(args.ptx.iterdir()) if path not in files]
    if not wrong:
        files[args.manifest] = manifest.text(args.kernels, ptxs, table)
        files |= {args.report / "ptx.md": report.markdown(table), args.report / "ptx.tsv": report.tsv(table)}
    if args.check:
        wrong = [line for path, text in files.items() for line in compare(path, text)] + wrong
        wrong += [f"{path} has no source: run scripts/ptx.sh" for path in stale]
    else:
        for path, text in files.items():
            path.write_text(text)
        for path in stale:
            path.unlink()
    for line in wrong:
        print(f"ptx: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (sources.Wrong, RuntimeError) as error:
        sys.exit(f"ptx: {error}")
