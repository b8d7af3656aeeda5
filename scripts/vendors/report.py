#!/usr/bin/env python3
"""Reads what scripts/vendors.sh collected and writes vendors.md, and every pipeline into LOGS/vendors.tsv.

    report.py LOGS VENDOR... [--out DIRECTORY | --partial]

LOGS holds VENDOR.out (what examples/pipelines printed) and VENDOR.stats (its markers with the compiler's statistics); of the vendor `dx12`
hlsl/list.tsv and hlsl/out.*.
Status 1 where a pipeline did not compile, has no statistics, or spills and is of the variant that would be chosen. --partial: only some
pipelines were compiled, perhaps none on a vendor.
"""

import sys
from pathlib import Path

from dx12 import Dx12
from stats import COLUMNS, Kernel

TITLES = {
    "navi21": "AMD RDNA2 (RADV)",
    "navi31": "AMD RDNA3 (RADV)",
    "gfx1201": "AMD RDNA4 (RADV)",
    "vega20": "AMD Vega (RADV)",
    "intel-skl": "Intel Skylake (ANV)",
    "intel-tgl": "Intel Tiger Lake (ANV)",
    "intel-dg2": "Intel Arc A770 (ANV)",
    "intel-mtl": "Intel Meteor Lake (ANV)",
    "intel-lnl": "Intel Lunar Lake (ANV)",
    "intel-bmg": "Intel Battlemage (ANV)",
    "apple-m1": "Apple M1 (Honeykrisp)",
    "adreno740": "Qualcomm Adreno 740 (Turnip)",
    "nvk-turing": "NVIDIA Turing (NVK)",
}
# What identifies a line of the table, and the dtypes that stand for the others.
SHOWN_DTYPES = ["q_f16.kv_f16.out_f16", "q_bf16.kv_bf16.out_bf16", "q_f32.kv_f32.out_f32", "q_bf16.kv_e4m3.out_bf16"]
SHOWN_SHAPES = ["512/64x16", "512/64x20"]


class Vendor:
    def __init__(self, name, logs):
        self.name = name
        self.out = (logs / f"{name}.out").read_text().splitlines()
        self.kernels = []
        pipeline = None
        for line in (logs / f"{name}.stats").read_text(errors="replace").splitlines():
            if line.startswith("@@ pipeline "):
                pipeline = line.removeprefix("@@ pipeline ")
            elif line.startswith("@@ compiling "):
                self.kernels.append(Kernel(pipeline, line.removeprefix("@@ compiling ")))
            elif self.kernels:
                self.kernels[-1].statistics.read(line)
        # A driver prints nothing for a binary that it has compiled before: merges of some dtypes are the same.
        known = {}
        for kernel in self.kernels:
            if kernel.statistics.seen:
                known.setdefault((kernel.variant, kernel.shape), kernel.statistics)
            elif kernel.variant.startswith("mla_merge"):
                kernel.statistics = known.get((kernel.variant, kernel.shape), kernel.statistics)
        # Some are compiled once with statistics and once without.
        best = {}
        for kernel in sorted(self.kernels, key=lambda kernel: not kernel.statistics.seen):
            best.setdefault(str(kernel), kernel)
        self.kernels = list(best.values())

    def said(self, what):
        """The values of the lines `what: ...` of the program."""
        said = [line.removeprefix(what).strip() for line in self.out if line.startswith(what)]
        return list(dict.fromkeys(said))

    def failures(self, partial):
        failed = [f"did not compile: {line.split('FAILED')[1].strip()}" for line in self.out if "FAILED" in line]
        silent = [kernel for kernel in self.kernels if not kernel.statistics.seen]
        # NVK's are collected for some only.
        if not partial and len(silent) == len(self.kernels):
            failed.append("no statistics at all")
        elif self.name != "nvk-turing":
            failed += [f"no statistics: {kernel}" for kernel in silent]
        return failed + [f"spills and is chosen: {spill}" for spill in self.spilling(True)]

    def spilling(self, chosen):
        spilling = [kernel for kernel in self.kernels if kernel.statistics.spills and kernel.chosen == chosen]
        return [f"{kernel}: {kernel.statistics.spills}" for kernel in spilling]

    def section(self):
        yield f"\n## {TITLES[self.name]}\n"
        yield "\n\n".join(f"`{said}`" for said in self.said("adapter:") + self.said("caps:")) + "\n"
        yield "Variants for an f16 query, 16 heads, best first:\n"
        yield from (f"- {why}" for why in self.said("why:"))
        yield "\n| kernel | shape | dtypes | chosen | " + " | ".join(COLUMNS) + " |\n|" + "---|" * (4 + len(COLUMNS))
        for kernel in self.shown():
            what = [kernel.variant, kernel.shape, kernel.dtypes, "yes" if kernel.chosen else ""]
            yield "| " + " | ".join(what + kernel.statistics.cells()) + " |"
        for title, spilling in [("chosen", self.spilling(True)), ("offered, not chosen", self.spilling(False))]:
            if spilling:
                yield f"\n<details><summary>{len(spilling)} kernels spill ({title})</summary>\n"
                yield from (f"- {spill}" for spill in spilling)
                yield "\n</details>"

    def shown(self):
        """Decodes of the usual dtypes, then the largest merge and the largest of each small op."""
        for kernel in self.kernels:
            usual = kernel.shape in SHOWN_SHAPES or kernel.dtypes == SHOWN_DTYPES[1]
            if "/" in kernel.shape and "merge" not in kernel.variant and not kernel.clamps:
                if usual and kernel.dtypes in SHOWN_DTYPES and kernel.statistics.seen:
                    yield kernel
        largest = {}
        for kernel in self.kernels:
            # A decode has the name of its variant alone.
            op, *variant = kernel.variant.split(".")
            if variant:
                code = kernel.statistics.values.get("code", 0)
                if op not in largest or code > largest[op].statistics.values.get("code", 0):
                    largest[op] = kernel
        yield from largest.values()


HEAD = """\
# Kernels through the vendors' compilers

Written by `scripts/vendors.sh`. Mesa's compilers behind a stub of the kernel driver compile every pipeline of
`examples/pipelines`; nothing is executed, so nothing here is a time. `scripts/vendors.sh` writes a line for every pipeline into `target/vendors/vendors.tsv`.

Registers are a lane's; of Intel a thread's, and the lanes that share them. Spills: registers spilled (AMD), spills and fills (Intel, Apple),
accesses of private memory (Adreno), spills to memory (NVIDIA); a chosen variant must have 0. LDS: workgroup memory in bytes. Waves: per SIMD (AMD), per core
(Adreno) or per SM (NVIDIA), threads per core (Apple). Code in bytes. Latency and inverse throughput: the compiler's own
estimate in cycles, where it prints one, loops counted by its guess. Small ops: the largest of each.

HLSL that naga writes is compiled by Microsoft's own DXC and FXC, under Wine. Apple's compiler of MSL is not to be had: Metal goes through none here.

| vendor | kernels compiled | with statistics | chosen and spill | not chosen and spill | most registers of a chosen one |
|---|---|---|---|---|---|"""


def write(vendors, dx12, directory):
    lines = [HEAD]
    for vendor in vendors:
        registers = [k.statistics.values["registers"] for k in vendor.kernels if k.chosen and k.statistics.seen]
        most = max(registers, key=lambda text: int(text.split()[0]), default="")
        told = sum(kernel.statistics.seen for kernel in vendor.kernels)
        counts = [len(vendor.kernels), told, len(vendor.spilling(True)), len(vendor.spilling(False)), most]
        lines.append(f"| {TITLES[vendor.name]} | " + " | ".join(map(str, counts)) + " |")
    for vendor in [*vendors, *dx12]:
        lines.extend(vendor.section())
    (directory / "vendors.md").write_text("\n".join(lines) + "\n")


def write_table(vendors, path):
    table = ["\t".join(["vendor", "kernel", "shape", "dtypes", "page list", "chosen", *COLUMNS])]
    for vendor in vendors:
        for kernel in vendor.kernels:
            flags = ["device" if kernel.clamps else "", "yes" if kernel.chosen else ""]
            what = [kernel.compiler or vendor.name, kernel.variant, kernel.shape, kernel.dtypes, *flags]
            table.append("\t".join(what + kernel.statistics.cells()))
    path.write_text("\n".join(table) + "\n")


def main(words):
    directory, partial = None, "--partial" in words
    words = [word for word in words if word != "--partial"]
    if "--out" in words:
        at = words.index("--out")
        directory = Path(words[at + 1])
        words = words[:at] + words[at + 2 :]
    logs = Path(words[0])
    vendors = [Vendor(name, logs) for name in TITLES if name in words[1:]]
    dx12 = [Dx12(logs / "hlsl")] if "dx12" in words[1:] else []
    if directory:
        write(vendors, dx12, directory)
        write_table([*vendors, *dx12], logs / "vendors.tsv")
    failed = [f"{vendor.name}: {failure}" for vendor in [*vendors, *dx12] for failure in vendor.failures(partial)]
    print("\n".join(failed), file=sys.stderr)
    kernels = sum(len(vendor.kernels) for vendor in [*vendors, *dx12])
    print(f"{kernels} kernels on {len(vendors) + 2 * len(dx12)} compilers, {len(failed)} failures")
    return 1 if failed or kernels == 0 else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
