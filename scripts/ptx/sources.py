"""Reads the comments of a .cu: the architectures it is compiled for, and each entry's limits.

Limits may also stand in a .cuh that it includes, beside a macro that makes kernels in several files; its own come first.
"""

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase

KNOWN = {"registers", "threads", "shared", "card", "spills"}


class Wrong(Exception):
    """A mistake in a source."""


@dataclass
class Arch:
    """A virtual architecture, as `compute_80`, and the PTX version that its file declares."""

    name: str
    version: tuple

    @property
    def number(self):
        return int(re.search(r"\d+", self.name)[0])

    @property
    def assembles_for(self):
        """Whether it assembles for `sm_NN`: for every later one, except where it is `compute_90a`."""
        if self.name[-1].isdigit():
            return lambda sm: sm.removeprefix("sm_").isdigit() and int(sm.removeprefix("sm_")) >= self.number
        return lambda sm: sm.removeprefix("sm_") == self.name.removeprefix("compute_")


@dataclass
class Limits:
    """What an entry may take. Registers are a thread's; shared is the most that a launch adds to its static shared memory; card is
    the least that a block may have on a card that it is launched on; spills is what a kernel that only runs forced may spill, in bytes."""

    registers: int
    threads: int
    shared: int = 0
    card: int = 0
    spills: int = 0
    file: str = ""


@dataclass
class Source:
    """A .cu file."""

    path: object
    archs: list
    limits: dict

    def limits_of(self, entry):
        """The name of the limits that an entry has, and the limits: its own, or the first whose `*` fits; or None."""
        fitting = [name for name in self.limits if name == entry] + [name for name in self.limits if fnmatchcase(entry, name)]
        return (fitting[0], self.limits[fitting[0]]) if fitting else None

    def output(self, arch):
        """The name of its PTX file."""
        return f"{self.path.stem}.ptx" if len(self.archs) == 1 else f"{self.path.stem}.{arch.name}.ptx"


def default_version(number):
    """The lowest that supports the architecture, so that the oldest possible driver loads the file."""
    if number <= 80:
        return (7, 0)
    return (8, 4) if number < 100 else (8, 7)


def read(path, root):
    """Reads the comments of a .cu. `root` is where the paths begin that it includes from other folders."""
    text = path.read_text()
    archs = []
    for named in re.findall(r"^// ptx:(.*)$", text, re.M):
        for item in named.split(","):
            found = re.fullmatch(r"\s*(compute_(\d+)[af]?)(?:\s+version=(\d+)\.(\d+))?\s*", item)
            if not found:
                raise Wrong(f"{path.name}: `// ptx:` takes `compute_NN [version=N.N], ...`, not `{item.strip()}`")
            version = (int(found[3]), int(found[4])) if found[3] else default_version(int(found[2]))
            archs.append(Arch(found[1], version))
    limits = {}
    for file in included(path, root):
        limits = limits_of(file) | limits
    return Source(path, archs or [Arch("compute_80", default_version(80))], limits)


def included(path, root):
    """A file, then those that it includes, and so on: from its own folder, or by their paths from `root`."""
    files = [path]
    for file in files:
        names = re.findall(r'^\s*#include "([^"]+)"', file.read_text(), re.M)
        for name in names:
            found = file.parent / name if (file.parent / name).exists() else root / name
            if found not in files:
                files.append(found)
    return files


def limits_of(file):
    """The limits in one file."""
    limits = {}
    for entry, rest in re.findall(r"// limits: ([\w*]+)(.*)$", file.read_text(), re.M):
        values = dict(re.findall(r"(\w+)=(\d+)", rest))
        if entry in limits or not {"registers", "threads"} <= set(values) <= KNOWN:
            raise Wrong(f"{file.name}: one `// limits: {entry} registers=N threads=N [shared=N] [card=N] [spills=N]`, please")
        limits[entry] = Limits(**{name: int(value) for name, value in values.items()}, file=file.name)
    return limits
