"""Operands: registers as `$index`, constants, special registers and names of variables."""

import struct

import numpy as np

from memory import SHARED_ROOM, SHARED_WINDOW
from parse import Unsupported, size_of, split_operands

UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
SIGNED = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}


def dtype_of(type_name):
    """The numpy dtype in which an instruction of a type computes; packed and bf16 values are bits."""
    if type_name == "pred":
        return np.dtype(np.bool_)
    if type_name in ("f16x2", "bf16x2"):
        return np.dtype(np.uint32)
    if type_name in ("f16", "f32", "f64"):
        return np.dtype({"f16": np.float16, "f32": np.float32, "f64": np.float64}[type_name])
    return np.dtype((SIGNED if type_name[0] == "s" else UNSIGNED)[size_of(type_name)])


def is_register(text):
    return text[0] == "$" and text[1:].isdigit()


def register(text):
    if not is_register(text):
        raise Unsupported(f"`{text}` as destination")
    return int(text[1:])


def elements(text):
    """What a `{...}` holds, or the one operand."""
    return split_operands(text[1:-1]) if text[0] == "{" else [text]


def constant(machine, text, dtype):
    """The value of a literal or of a variable's address."""
    if text in machine.symbols:
        value = machine.symbols[text]
    elif text[:2] in ("0f", "0F"):
        value = struct.unpack("<f", struct.pack("<I", int(text[2:], 16)))[0]
        return np.array([int(text[2:], 16)], np.uint32).view(np.float32) if dtype.itemsize == 4 else np.array([value], dtype)
    elif text[:2] in ("0d", "0D"):
        return np.array([int(text[2:], 16)], np.uint64).view(np.float64)
    else:
        try:
            value = int(text.rstrip("U"), 0)
        except ValueError:
            raise Unsupported(f"operand `{text}`") from None
    if dtype.kind == "b":
        return np.array([bool(value)])
    if dtype.kind == "f":
        return np.array([value], dtype)
    return np.array([value % (1 << 8 * dtype.itemsize)], UNSIGNED[dtype.itemsize]).view(dtype)


def source(machine, text, type_name):
    """A function of the team that gives the operand's value as the type's dtype."""
    dtype = dtype_of(type_name)
    if is_register(text):
        index = int(text[1:])
        have = np.dtype(machine.register_dtypes[index])
        if have == dtype:
            return lambda team: team.regs[index]
        if have.itemsize == dtype.itemsize:
            return lambda team: team.regs[index].view(dtype)
        # A wider register is cut, as for `st.u8`.
        plain = UNSIGNED[dtype.itemsize]
        return lambda team: team.regs[index].astype(plain).view(dtype)
    if text[0] == "%":
        if text == "%clock":
            return lambda team: np.array([machine.steps], np.uint32)
        return lambda team: team.special[text].astype(dtype)
    value = constant(machine, text, dtype)
    return lambda team: value


def address(machine, text):
    """`[base+offset]` as a function of the team that gives unsigned addresses, in 64 bits."""
    inner = text.strip("[]")
    base, _, offset = inner.partition("+")
    if not offset and "-" in inner:
        base, _, offset = inner.partition("-")
        offset = "-" + offset
    shift = np.int64(int(offset, 0) if offset else 0)
    base = base.strip()
    if is_register(base):
        index = int(base[1:])
        return lambda team: (team.regs[index].astype(np.int64) + shift).view(np.uint64)
    value = constant(machine, base, np.dtype(np.uint64)) + np.uint64(shift)
    return lambda team: np.broadcast_to(value, team.lanes)


def in_shared_window(addresses):
    return (addresses >= np.uint64(SHARED_WINDOW)) & (addresses < np.uint64(SHARED_WINDOW + SHARED_ROOM))
