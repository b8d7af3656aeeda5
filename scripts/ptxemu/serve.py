"""Runs the launches of the emulated CUDA driver (tests/cuda_driver), whose memory it maps: a line of JSON each, answered by a line.

    serve.py FOLDER     which has `bytes` and `rights`, and the PTX of module N as N.ptx
"""

import json
import mmap
import os
import sys
import time
from functools import cache
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1] / "ptx"))
from compiler import entries, for_card

from cluster import shape_of
from launch import ORDERS, Device
from memory import BASE, GAP, READ, Fault, Global
from parse import Unsupported, parse

FOLDER = Path(sys.argv[1])
ORDER_NAMES = ("forward", "reverse") if os.environ.get("MLA_EMULATED_ORDERS") == "both" else ("forward",)
# The driver leaves the first part of the memory to parameters and to the constants of modules.
PARAMETERS = 16 << 20


def mapped(name):
    with (FOLDER / name).open("r+b") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)


class Mapped(Global):
    """The driver's memory. Arrays that are added lie in the part before its buffers, until `reset`."""

    def __init__(self):
        self.bytes, self.rights = mapped("bytes"), mapped("rights")
        self.reset()

    def reset(self):
        self.places, self.next = {}, GAP

    def add(self, array, writable=True):
        data = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
        start, self.next = self.next, self.next + -(-len(data) // 256) * 256 + GAP
        if self.next > PARAMETERS:
            raise Fault("no room for parameters")
        self.bytes[start : start + len(data)] = data
        self.rights[start : start + len(data)] = READ
        self.places[BASE + start] = (start, np.asarray(array).shape, np.asarray(array).dtype)
        return BASE + start


class Launcher(Device):
    """A device that does not own its memory."""

    def __init__(self):
        self.memory = Mapped()
        self.steps = self.atomics = 0

    def run(self, entry, told):
        self.memory.reset()
        block, grid = told["block"], told["grid"]
        if entry.threads and int(np.prod(block)) > entry.threads:
            raise Fault(f"{entry.name}: {int(np.prod(block))} threads, but bounds of {entry.threads}")
        symbols = self.symbols(entry, [bytes.fromhex(text) for text in told["parameters"]])
        shape, used, results = shape_of(entry, grid, None), slice(0, told["end"]), []
        before = self.memory.bytes[used].copy() if len(ORDER_NAMES) > 1 else None
        for name in ORDER_NAMES:
            if results:
                self.memory.bytes[used] = before
            self.once(entry, symbols, grid, block, told["shared"], ORDERS[name], True, 8, shape)
            if before is not None:
                results.append(self.memory.bytes[used].copy())
        if any((one != results[0]).any() for one in results[1:]):
            at = int(np.flatnonzero(results[0] != results[-1])[0])
            raise Fault(f"{entry.name}: byte {at} of global memory depends on the order of the warps")


@cache
def module(number):
    text = (FOLDER / f"{number}.ptx").read_text()
    if folder := os.environ.get("MLA_EMULATED_PTX"):
        for other in map(Path.read_text, sorted(Path(folder).glob("*.ptx"))):
            if entries(text).items() <= entries(other).items():
                # The host has made the text so: see src/cuda/kernels/ptx.rs.
                return parse(for_card(other, 90) if ".target sm_90" in text else other)
    return parse(text)


def main():
    launcher = Launcher()
    seconds = {}
    for line in sys.stdin:
        told, fault, begin = json.loads(line), None, time.monotonic()
        try:
            launcher.run(module(told["module"])[told["name"]], told)
        except Fault as error:
            fault = str(error)
        except Unsupported as error:
            fault = f"not known to the interpreter: {error}"
        seconds[told["name"]] = seconds.get(told["name"], 0) + time.monotonic() - begin
        print(json.dumps({"fault": fault}), flush=True)
    for path in FOLDER.iterdir():
        path.unlink()
    FOLDER.rmdir()
    if path := os.environ.get("MLA_EMULATED_TIMES"):
        with open(path, "a") as file:
            file.writelines(f"{took:.1f}\t{name}\n" for name, took in seconds.items())


if __name__ == "__main__":
    main()
