"""The bytes of a kernel's arguments, by the manifest's names, offsets and kinds of its fields."""

import re
import struct
from functools import cache
from pathlib import Path

MANIFEST = Path(__file__).resolve().parents[2] / "shaders/cuda/src/manifest.rs"
FORMS = {"U32": "<I", "U64": "<Q", "F32": "<f"}


@cache
def layouts():
    """By the name that the manifest gives it: the bytes of a struct, and its fields' offsets and kinds."""
    found = {}
    for name, size, fields in re.findall(r"static (\w+): Layout = Layout \{.*? bytes: (\d+), fields: &\[(.*)\] \};", MANIFEST.read_text()):
        triples = re.findall(r'name: "([\w.]+)", offset: (\d+), kind: (\w+)', fields)
        found[name] = int(size), {field: (int(offset), FORMS[kind]) for field, offset, kind in triples}
    return found


def packed(layout, **values):
    """A struct whose fields all have a value."""
    size, fields = layouts()[layout]
    if values.keys() != fields.keys():
        raise KeyError(f"{layout}: {sorted(values.keys() ^ fields.keys())} are in one of both only")
    data = bytearray(size)
    for name, value in values.items():
        offset, form = fields[name]
        struct.pack_into(form, data, offset, value)
    return bytes(data)
