"""Helpers of the tests: buffers, launches in both orders of the warps, and PTX from its file or from a .cu of the tests.

    device = Device()
    x = device.buffer(array)                                    copied in; reads past its end are faults
    device.launch(kernels("shaders/cuda/ptx/a.ptx")["name"], (grid, 1, 1), [struct.pack("<QI4x", x, n)], shared=1024)
    device.read(x)

A launch runs with its warps first to last and again last to first, from the same memory, and both must give the same bits.
"""

import os
import re
import sys
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np

from cluster import shape_of
from machine import Machine
from memory import Fault, Global
from parse import matching_brace, parse

ROOT = Path(__file__).resolve().parents[2]
ORDERS = {"forward": lambda turns: turns, "reverse": lambda turns: turns[::-1]}
FULL = os.environ.get("MLA_FULL") == "1"


def long(test):
    """A test that run.py leaves to MLA_FULL=1."""
    test.long = True
    return test


class Device:
    """Global memory, and launches."""

    def __init__(self):
        self.memory = Global()
        self.steps = 0
        self.atomics = 0  # atomic instructions that ran

    def buffer(self, array, writable=True):
        """Copies an array into a buffer of its own; returns the address."""
        return self.memory.add(array, writable)

    def read(self, address):
        """A buffer's array as it is now."""
        return self.memory.get(address)

    def launch(self, entry, grid, args, block=None, shared=0, orders=("forward", "reverse"), races=True, beside=8, same=True, cluster=None):
        """Runs an entry. `args` has the bytes of each parameter; `block` is needed where the launch bounds do not
        give its size; `shared` is dynamic shared memory in bytes; `beside` blocks run at a time; `cluster` is the blocks of a cluster, along x
        or (x, y, z), where the entry does not require it. `same` is off where the result may depend
        on the order, as with sums by atomics. Raises Fault."""
        block = block or (entry.threads, 1, 1)
        if entry.threads and int(np.prod(block)) > entry.threads:
            raise Fault(f"{entry.name}: {int(np.prod(block))} threads, but bounds of {entry.threads}")
        shape = shape_of(entry, grid, cluster)
        symbols = self.symbols(entry, args)
        before, results = self.memory.bytes.copy(), []
        for name in orders:
            self.memory.bytes = before.copy()
            self.once(entry, symbols, grid, block, shared, ORDERS[name], races, beside, shape)
            results.append(self.memory.bytes)
        if same and any((one != results[0]).any() for one in results):
            at = int(np.flatnonzero(results[0] != results[-1])[0])
            raise Fault(f"{entry.name}: byte {at} of global memory depends on the order of the warps")

    def symbols(self, entry, args):
        """Parameters and constants lie in global memory, read only."""
        if len(args) != len(entry.params):
            raise Fault(f"{entry.name} has {len(entry.params)} parameters, not {len(args)}")
        symbols = {}
        for (name, size), value in zip(entry.params, args):
            if len(value) != size:
                raise Fault(f"{entry.name}: parameter {name} has {size} bytes, not {len(value)}")
            symbols[name] = self.buffer(np.frombuffer(value, np.uint8), False)
        for name, value in entry.data.items():
            symbols[name] = self.buffer(np.frombuffer(value, np.uint8))
        return symbols

    def once(self, entry, symbols, grid, block, shared, order, races, beside, cluster):
        clusters = order(list(places([count // side for count, side in zip(grid, cluster)])))
        some = max(beside // int(np.prod(cluster)), 1)
        with np.errstate(all="ignore"):
            for start in range(0, len(clusters), some):
                blocks = [tuple(np.add(np.multiply(at, cluster), within).tolist()) for at in clusters[start : start + some] for within in places(cluster)]
                machine = Machine(entry, self.memory, symbols, grid, block, blocks, shared, order, races, cluster)
                self.steps += machine.run()
                self.atomics += machine.atomics


def places(sides):
    """All (x, y, z) of a grid, x first."""
    return ((x, y, z) for z, y, x in product(*(range(side) for side in sides[::-1])))


# What the test that runs has read: `PATH:ENTRY`, or `PATH:` for the names of a file's entries. See entries.py.
TRACED = set()


class Entries(dict):
    """The entries of a file. Each access is noted in the list of what the running test has read."""

    def __init__(self, path, entries):
        super().__init__(entries)
        self.path = path

    def __getitem__(self, name):
        TRACED.add(f"{self.path}:{name}")
        return super().__getitem__(name)

    def __iter__(self):
        TRACED.add(f"{self.path}:")
        return super().__iter__()

    def all_of_it(self, *_):
        raise NotImplementedError("iterate over the names, and take entries by name: what a test reads is noted")

    values = items = get = pop = all_of_it


@cache
def parsed(path):
    return Entries(path, parse((ROOT / path).read_text()))


def kernels(path):
    """The entries of a committed PTX file, by its path in the repository."""
    return parsed(path)


def text_with(path, entry):
    """The text of a committed PTX file, of which a test changes an entry."""
    TRACED.add(f"{path}:{entry}")
    return (ROOT / path).read_text()


@cache
def compiled(path, arch="compute_80"):
    """The PTX text of a .cu beside the tests."""
    sys.path.append(str(ROOT / "scripts/ptx"))
    from compiler import compile_cu
    from sources import Arch

    return compile_cu(ROOT / path, Arch(arch, (9, 0)))


def barriers(ptx, entry):
    """Where the barriers of an entry stand in a PTX text."""
    start = re.search(rf"\.entry\s+{entry}\s*\([^)]*\)[^{{]*", ptx).end()
    end = matching_brace(ptx, start)
    return [found.span() for found in re.finditer(r"\bbar(?:rier)?(?:\.cta)?\.(?:sync|red)\b[^;]*;", ptx) if start < found.start() < end]


def without_barrier(ptx, entry, index):
    """The text without one barrier, to test that its lack is found."""
    start, end = barriers(ptx, entry)[index]
    return ptx[:start] + ptx[end:]


def expect_fault(run, *words):
    """Runs something that must be a Fault whose text has one of the words."""
    try:
        run()
    except Fault as fault:
        assert not words or any(word in str(fault) for word in words), f"another fault: {fault}"
        return
    raise AssertionError(f"no fault ({', '.join(words)})")
