"""Runs ptxas of three CUDA versions: the resources of every entry by each."""

import hashlib
import json
import re
import struct
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from cache import kept
from compiler import TOOLS, for_card

OLDER = ["sm_80", "sm_86", "sm_89", "sm_90"]


@dataclass
class Assembler:
    """A ptxas: the latest PTX that it reads and the cards that it assembles for."""

    name: str
    path: Path
    version: tuple
    targets: list


ASSEMBLERS = [
    Assembler("12.4", TOOLS / "ptxas-12.4/nvidia/cuda_nvcc/bin/ptxas", (8, 4), OLDER),
    Assembler("12.8", TOOLS / "ptxas-12.8/nvidia/cuda_nvcc/bin/ptxas", (8, 7), [*OLDER, "sm_100", "sm_120"]),
    Assembler("13.0", TOOLS / "nvcc-13.0/nvidia/cu13/bin/ptxas", (9, 0), [*OLDER, "sm_100", "sm_103", "sm_120"]),
]


@dataclass
class Job:
    """One PTX text for one card with one assembler."""

    source: object
    arch: object
    ptx: str
    assembler: Assembler
    target: str

    @property
    def place(self):
        return f"{self.target} by {self.assembler.name}"


@dataclass
class Usage:
    """The resources of an entry: registers of a thread, shared memory, code and spills, in bytes; and a digest of the code."""

    registers: int = 0
    static: int = 0
    dynamic: int = 0
    stack: int = 0
    spills: int = 0
    code: int = 0
    digest: str = ""


def jobs_of(source, arch, ptx):
    """Every assembler that reads the PTX, for every card that it serves."""
    return [
        Job(source, arch, ptx, assembler, target)
        for assembler in ASSEMBLERS
        if assembler.version >= arch.version
        for target in wanted(assembler, arch)
    ]


def wanted(assembler, arch):
    # `compute_90a` assembles for sm_90a alone, which is in no list.
    targets = assembler.targets if arch.name[-1].isdigit() else [arch.name.replace("compute_", "sm_")]
    return [target for target in targets if arch.assembles_for(target)]


def assemble(job):
    """Returns the resources of each function by name, and complaints."""
    text = for_card(job.ptx, int(re.search(r"\d+", job.target)[0]))
    try:
        said, code = json.loads(kept(["ptxas -v", job.assembler.name, job.target, text], lambda: json.dumps(ptxas(job, text))))
    except Refused as error:
        return {}, [str(error).replace("in.ptx", job.source.output(job.arch))]
    complaints = [line.replace("in.ptx", job.source.output(job.arch)) for line in said.splitlines() if "warning" in line]
    usages = read_usages(said)
    for name, (size, digest) in code.items():
        usage = usages.setdefault(name, Usage())
        usage.code, usage.digest = size, digest
    return usages, complaints


class Refused(Exception):
    """What ptxas said of a text that it does not take."""


def ptxas(job, text):
    """What it said of the text, as `in.ptx`, and the code of each function: bytes and a digest."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "in.ptx").write_text(text)
        command = [job.assembler.path, "-v", f"-arch={job.target}", "in.ptx", "-o", "out.cubin"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        said = done.stdout + done.stderr
        if done.returncode:
            raise Refused(said.strip())
        return said, code_of((Path(folder) / "out.cubin").read_bytes())


def read_usages(said):
    """Reads the lines of `ptxas -v`. The registers follow the properties of the function that they are of."""
    usages, current = {}, Usage()
    for line in said.splitlines():
        if found := re.search(r"Function properties for (\w+)", line):
            current = usages.setdefault(found[1], Usage())
        elif found := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            current.stack = int(found[1])
            current.spills = int(found[2]) + int(found[3])
        elif found := re.search(r"Used (\d+) registers", line):
            current.registers = int(found[1])
            shared = re.search(r"(\d+)(?:\+\d+)? bytes smem", line)
            current.static = int(shared[1]) if shared else 0
    return usages


def code_of(cubin):
    """Bytes and a digest of each function: a cubin is an ELF of 64 bits whose sections `.text.NAME` hold the code."""
    at, size, count, names = struct.unpack_from("<Q10xHHH", cubin, 40)
    sections = [struct.unpack_from("<II8xQQQ", cubin, at + size * index) for index in range(count)]
    strings = sections[names][3]
    found = {}
    for name, _, _, begin, length in sections:
        start = strings + name
        text = cubin[start : cubin.index(b"\0", start)].decode()
        if text.startswith(".text."):
            found[text.removeprefix(".text.")] = (length, hashlib.sha256(cubin[begin : begin + length]).hexdigest())
    return found
