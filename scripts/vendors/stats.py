"""What a compiler said about kernels: its statistics, and which kernels they are of."""

import re

COLUMNS = ["registers", "spills", "LDS", "waves", "instructions", "code", "latency", "inverse throughput"]


def numbers(pattern, line):
    """The groups of a pattern as numbers, or None."""
    found = re.search(pattern, line)
    return found and [int(group) for group in found.groups()]


class Statistics:
    """What a compiler said about one kernel, gathered from its lines."""

    def __init__(self):
        self.values = {}
        self.spills = 0
        self.seen = False

    def read(self, line):
        # RADV: a block of `name: number` lines.
        if found := numbers(r"^VGPRs: (\d+)", line):
            self.seen = True
            self.values["registers"] = f"{found[0]} VGPR {self.values.get('registers', '')}".strip()
        elif found := numbers(r"^SGPRs: (\d+)", line):
            self.values["registers"] = f"{found[0]} SGPR"
        elif found := numbers(r"^Spilled [SV]GPRs: (\d+)", line):
            self.spills += found[0]
        elif found := numbers(r"^Code size: (\d+)", line):
            self.values["code"] = found[0]
        elif found := numbers(r"^LDS size: (\d+)", line):
            self.values["LDS"] = found[0]
        elif found := numbers(r"^Subgroups per SIMD: (\d+)", line):
            self.values["waves"] = found[0]
        elif found := numbers(r"^Latency: (\d+)", line):
            self.values["latency"] = found[0]
        elif found := numbers(r"^Inverse Throughput: (\d+)", line):
            self.values["inverse throughput"] = found[0]
        # AGX: one line.
        elif found := numbers(
            r"^CS shader: .* (\d+) code size, (\d+) gprs, (\d+) uniforms, .* (\d+) threads, .* (\d+):(\d+) spills", line
        ):
            self.seen = True
            code, registers, uniforms, threads, spills, fills = found
            self.values.update(code=code, registers=f"{registers} GPR {uniforms} uniform", waves=f"{threads} threads")
            self.spills += spills + fills
        # ir3: comments, and the instructions that reach private memory.
        elif found := numbers(r"CL prog .* (\d+) dwords", line):
            self.seen = True
            self.values["code"] = 4 * found[0]
        elif found := numbers(r"CL prog .* (\d+) half, (\d+) full", line):
            self.values["registers"] = f"{found[1]} full {found[0]} half"
        elif found := numbers(r"CL prog .* (\d+) max_waves", line):
            self.values["waves"] = found[0]
        elif re.search(r"\b(stp|ldp)\.", line):
            self.spills += 1
        elif found := numbers(r"shared_size: (\d+)", line):
            self.values["LDS"] = found[0]
        # NAK: a block of `name: number` lines; an instruction has 16 bytes.
        elif found := numbers(r"^Instruction count: (\d+)", line):
            self.seen = True
            self.values.update(instructions=found[0], code=16 * found[0])
        elif found := numbers(r"^Static cycle count: (\d+)", line):
            self.values["latency"] = found[0]
        elif found := numbers(r"^Max warps/SM: (\d+)", line):
            self.values["waves"] = found[0]
        elif found := numbers(r"^Spills to mem: (\d+)", line):
            self.spills += found[0]
        elif found := numbers(r"^Num GPRs: (\d+)", line):
            self.values["registers"] = f"{found[0]} GPR"
        # Intel: one line, of the width that was taken. Every thread has 128 registers of 8 lanes, or of 16 from Xe2 on.
        elif found := numbers(
            r"^CS SIMD(\d+) shader: (\d+) inst, \d+ loops, (\d+) cycles, (\d+):(\d+) spills:fills,.* to (\d+) bytes", line
        ):
            self.seen = True
            width, instructions, cycles, spills, fills, code = found
            self.values.update(registers=f"128 GRF SIMD{width}", instructions=instructions, latency=cycles, code=code)
            self.spills += spills + fills

    def cells(self):
        if not self.seen:
            return [""] * len(COLUMNS)
        return [str(self.spills if column == "spills" else self.values.get(column, "")) for column in COLUMNS]


class Kernel:
    """One compiled kernel: of which shape and dtypes, and whether a decode would get it."""

    def __init__(self, pipeline, label):
        chosen, self.shape, self.variant, self.dtypes, *more = pipeline.split(" ", 4)
        # A merge serves every variant, and the small ops have one.
        self.chosen = chosen == "chosen" or "mla_decode" not in label
        self.clamps = "device_page_list" in more
        if "mla_decode" not in label:
            self.variant = label.removeprefix("mla.")
            self.dtypes = " ".join([self.dtypes, *more]) if self.shape == "any" else self.dtypes
        self.statistics = Statistics()
        # Where a vendor has several.
        self.compiler = None

    def __str__(self):
        clamps = " device_page_list" if self.clamps else ""
        return f"{self.variant} {self.shape} {self.dtypes}{clamps}"
