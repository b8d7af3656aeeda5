"""Writes shaders/cuda/src/manifest.rs: each entry's resources and argument layout, a line each, so that parts can be compared."""

import re

import layout
import sources
from compiler import WAITS, constants, entries

HEAD = """\
// Written by scripts/ptx.sh from kernels/**/*.cu: each entry of ptx/*.ptx, and the structs that they are given.
use crate::Kind::{F32, U32, U64};
use crate::{Entry, Field, Layout};

"""


def text(kernels, ptxs, table):
    """The whole file. `table` maps (PTX file, entry) to (limits, results), as the report's."""
    found = [rows(kernels, *ptx, table) for ptx in ptxs]
    structs = dict.fromkeys(line for layouts, _ in found for line in layouts)
    lines = [line for _, entries in found for line in entries]
    return HEAD + "\n".join([*structs, "", "/// All entries, those of a module together.", "pub static ENTRIES: &[Entry] = &[", *lines, "];"]) + "\n"


def has(path, kernels, source, arch, ptx, table):
    """Whether the committed file's lines about a PTX file are the expected ones."""
    structs, entries = rows(kernels, source, arch, ptx, table)
    module = f'{{ module: "{source.output(arch).removesuffix(".ptx")}",'
    return [*structs, *entries] == [line for line in path.read_text().splitlines() if line in structs or module in line]


def rows(kernels, source, arch, ptx, table):
    """The lines of one PTX file: of its structs, and of its entries."""
    file = source.output(arch)
    module, layouts, structs, lines = file.removesuffix(".ptx"), layout.layouts_of(source.path, kernels, ptx), {}, []
    own = {part.split("(")[0]: part for part in ptx.split(".entry ")[1:]}
    declared = {what: constants(ptx, what) for what in ("threads", "shared_bytes", "tokens")}
    for name, threads in entries(ptx).items():
        of, tensor_maps = layouts[name]
        static, line = struct(kernels, source, of)
        structs[static] = line
        limits, results = table[file, name]
        tokens = declared["tokens"].get(name)
        if declared["threads"].get(name, threads) != threads:
            raise layout.Unknown(f"{file}: {name}_threads is not its launch bounds, {threads}")
        fields = {
            "module": f'"{module}"',
            "name": f'"{name}"',
            "capability": arch.number,
            "later_cards": str(arch.name[-1].isdigit()).lower(),
            "threads": threads,
            "shared_bytes": declared["shared_bytes"].get(name, limits.shared),
            "tokens": f"Some({tokens})" if tokens else "None",
            "registers": max(usage.registers for usage in results.values()),
            "waits": str(WAITS in own[name]).lower(),
            "tensor_maps": tensor_maps,
            "cluster": cluster(own[name]),
            "args": f"&{static}",
            "deflated": f'deflated!("{module}", "{name}")',
        }
        lines.append(f"    Entry {{ {', '.join(f'{field}: {value}' for field, value in fields.items())} }},")
    return list(structs.values()), lines


def cluster(ptx):
    """Blocks of a cluster, by an entry's text: 1 where it asks for none."""
    found = re.search(r"\.reqnctapercluster (\d+)", ptx)
    return int(found[1]) if found else 1


def struct(kernels, source, of):
    """The name of a struct's layout, after the file that declares it, and its line. Kernels of several files may share one."""
    name = of.name.split("<")[0]
    file = next(file for file in sources.included(source.path, kernels) if f"struct {name} {{" in file.read_text())
    static = re.sub(r"\W+", "_", f"{file.stem}_{re.sub(r'(?<=[a-z])(?=[A-Z])', '_', of.name)}".rstrip(">")).upper()
    fields = ", ".join(f'Field {{ name: "{name}", offset: {offset}, kind: {kind} }}' for name, offset, kind in of.fields)
    place = file.relative_to(kernels).as_posix()
    return static, f'static {static}: Layout = Layout {{ file: "{place}", name: "{of.name}", bytes: {of.bytes}, fields: &[{fields}] }};'
