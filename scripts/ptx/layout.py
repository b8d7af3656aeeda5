"""The byte layout of each entry's argument struct, from the declarations in the preprocessed source.

It knows numbers, pointers, and structs of them, including templates of one type. Anything else is an error, and so is a size or an
alignment that differs from the PTX.
"""

import re
import subprocess
from dataclasses import dataclass

# Bytes of each type; an address is a number here.
NUMBERS = {"u32": 4, "u64": 8, "float": 4}
KINDS = {"u32": "U32", "u64": "U64", "float": "F32"}


class Unknown(RuntimeError):
    """A declaration that is not supported, or that differs from the PTX."""


@dataclass
class Layout:
    """`fields` are numbers, as (path, offset, kind): those of a struct inside are `name.field`."""

    name: str
    bytes: int
    align: int
    fields: list


def layouts_of(path, include, ptx):
    """By entry: its layout, and whether it takes a TMA tensor map too."""
    text = preprocessed(path, include)
    pattern = r'extern "C" __global__ void\s+(?:__cluster_dims__\([^)]*\) )?__launch_bounds__\s*\(.*?\)\s*(\w+)\(\s*const (?:__grid_constant__ )?([\w<>]+) args\b'
    types = dict(re.findall(pattern, text))
    return {entry: checked(path, entry, parameters, types, text) for entry, parameters in parameters_of(ptx).items()}


def preprocessed(path, include):
    command = ["g++", "-E", "-P", "-x", "c++", "-I", include, path]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise Unknown(f"g++ -E of {path.name}:\n{done.stderr}")
    return done.stdout


def parameters_of(ptx):
    """By entry: alignment and bytes of each parameter, as the compiler saw them."""
    heads = re.findall(r"\.entry (\w+)\(([^)]*)\)", ptx)
    return {name: [(int(align), int(size)) for align, size in re.findall(r"\.align (\d+) \.b8 \w+\[(\d+)\]", head)] for name, head in heads}


def checked(path, entry, parameters, types, text):
    if entry not in types:
        raise Unknown(f"{path.name}: {entry} has no parameter `const TYPE args` that is understood")
    layout = struct(path, types[entry], text)
    if parameters[:1] != [(layout.align, layout.bytes)]:
        raise Unknown(f"{path.name}: {entry} takes {parameters} (alignment, bytes), its {layout.name} is read as {layout.bytes} bytes: {layout.fields}")
    # The second parameter is a struct TensorMap of lib/tma.cuh, or a struct of several.
    align, size = (parameters[1:] or [(64, 0)])[0]
    if len(parameters) > 2 or align != 64 or size % 128:
        raise Unknown(f"{path.name}: {entry} takes something else behind its arguments: {parameters}")
    return layout, size // 128


def struct(path, name, text):
    """Its layout by C's rules: a member begins at the next multiple of its alignment, and the whole is a multiple of the largest."""
    plain, _, argument = name.rstrip(">").partition("<")
    found = re.findall(rf"(?:template <class (\w+)>\s*)?struct {plain} \{{([^{{}}]*)\}};", text)
    if len(found) != 1:
        raise Unknown(f"{path.name}: {len(found)} declarations of struct {plain} without functions")
    parameter, body = found[0]
    at, align, fields = 0, 1, []
    for kind, member in members(path, plain, re.sub(rf"\b{parameter}\b", argument, body) if parameter else body):
        inner = number(kind) or struct(path, kind, text)
        at = -(-at // inner.align) * inner.align
        fields += [(f"{member}.{field}" if field else member, at + offset, of) for field, offset, of in inner.fields]
        at += inner.bytes
        align = max(align, inner.align)
    return Layout(name, -(-at // align) * align, align, fields)


def members(path, name, body):
    """Pairs of type and name, in order."""
    for line in filter(None, map(str.strip, body.split(";"))):
        found = re.fullmatch(r"((?:const )?[\w<>]+\s*\*?)\s*(\w+(?:,\s*\w+)*)", line)
        if not found:
            raise Unknown(f"{path.name}: struct {name} has `{line}`")
        if "*" in found[1] and "," in found[2]:
            raise Unknown(f"{path.name}: struct {name}: one pointer a line, not `{line}`")
        yield from ((found[1].strip(), member) for member in re.split(r",\s*", found[2]))


def number(kind):
    kind = "u64" if kind.endswith("*") else kind
    if size := NUMBERS.get(kind):
        return Layout(kind, size, size, [("", 0, KINDS[kind])])
    return None
