"""`cvt`, and the formats that numpy does not have: bf16 as bits, and FP8."""

import numpy as np

from operands import SIGNED, UNSIGNED, dtype_of, register, source
from parse import Unsupported, size_of


def bf16_value(bits):
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def bf16_bits(value):
    """Rounded to nearest, ties to even; NaN is the one that cards give."""
    word = np.ascontiguousarray(value.astype(np.float32)).view(np.uint32)
    rounded = (word + np.uint32(0x7FFF) + ((word >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(value), np.uint16(0x7FFF), rounded.astype(np.uint16))


def e4m3_table():
    """The values of all codes: 4 bits of exponent, 3 of mantissa, no infinity."""
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    size = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    size = np.where(codes & 127 == 127, np.nan, size)
    return np.where(codes & 128, -size, size).astype(np.float32)


E4M3 = e4m3_table()
# The finite codes of no sign, in order, and the values halfway between them.
E4M3_SIZES = E4M3[:127].astype(np.float64)


def e4m3_code(value):
    """`cvt.rn.satfinite.e4m3x2`: the nearest code, ties to the even one; too large becomes the largest."""
    value = value.astype(np.float64)
    size = np.minimum(np.abs(np.where(np.isnan(value), 0, value)), E4M3_SIZES[-1])
    above = np.clip(np.searchsorted(E4M3_SIZES, size), 1, 126)
    low, high = size - E4M3_SIZES[above - 1], E4M3_SIZES[above] - size
    up = (high < low) | ((high == low) & (above % 2 == 0))
    code = np.where(up, above, above - 1)
    code = np.where(np.isnan(value), 127, code)
    return (code | np.where(np.signbit(value), 128, 0)).astype(np.uint8)


def decode(machine, instruction):
    if instruction.name != "cvt":
        return None
    to, of = [mod for mod in instruction.mods if mod[-1].isdigit() and mod[0] in "bsufe"][-2:]
    if to in ("f16x2", "bf16x2") and of == "f32":
        return pack(machine, instruction, to)
    if to == "f16x2" and of == "e4m3x2":
        return from_e4m3(machine, instruction)
    if to == "e4m3x2":
        return to_e4m3(machine, instruction, of)
    return scalar(machine, instruction, to, of)


def pair(low, high):
    return low.astype(np.uint32) | (high.astype(np.uint32) << np.uint32(16))


def half_bits(value):
    return value.astype(np.float16).view(np.uint16)


def pack(machine, instruction, to):
    """The first source is the high half."""
    target = register(instruction.operands[0])
    high, low = (source(machine, text, "f32") for text in instruction.operands[1:3])
    bits = bf16_bits if to == "bf16x2" else half_bits
    relu = instruction.has("relu")

    def run(team, mask):
        values = [np.fmax(get(team), np.float32(0)) if relu else get(team) for get in (low, high)]
        team.put(target, pair(bits(values[0]), bits(values[1])), mask)

    return run


def from_e4m3(machine, instruction):
    target, get = register(instruction.operands[0]), source(machine, instruction.operands[1], "u16")
    table = E4M3.astype(np.float16).view(np.uint16)

    def run(team, mask):
        codes = get(team)
        team.put(target, pair(table[codes & np.uint16(255)], table[codes >> np.uint16(8)]), mask)

    return run


def to_e4m3(machine, instruction, of):
    target = register(instruction.operands[0])
    if of == "f16x2":
        get = source(machine, instruction.operands[1], "u32")

        def halves(team):
            both = np.ascontiguousarray(get(team)).view(np.float16).reshape(-1, 2)
            return both[:, 0], both[:, 1]

    else:
        high, low = (source(machine, text, "f32") for text in instruction.operands[1:3])

        def halves(team):
            return low(team), high(team)

    def run(team, mask):
        low, high = (e4m3_code(value).astype(np.uint16) for value in halves(team))
        team.put(target, low | (high << np.uint16(8)), mask)

    return run


ROUND = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def to_integer(value, kind, how):
    """Rounded as asked, kept within the type's range; NaN is zero."""
    limits = np.iinfo(kind)
    value = how(value.astype(np.float64))
    inside = np.clip(np.nan_to_num(value, nan=0, posinf=np.inf, neginf=-np.inf), float(limits.min), float(limits.max))
    top = inside >= float(limits.max)
    return np.where(top, limits.max, np.where(top, 0, inside).astype(kind)).astype(kind)


def toward_zero(value, to):
    """`rz` of f32 to a shorter format: the bits that do not fit are cut."""
    if to == "bf16":
        return (np.ascontiguousarray(value).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    near = value.astype(np.float16)
    over = np.abs(near.astype(np.float32)) > np.abs(value)
    return np.where(over, np.nextafter(near, np.float16(0)), near)


def scalar(machine, instruction, to, of):
    target = register(instruction.operands[0])
    get = source(machine, instruction.operands[1], "u16" if of == "bf16" else of)
    wide = np.dtype(machine.register_dtypes[target])
    how = next((ROUND[mod] for mod in instruction.mods if mod in ROUND), None)
    floats = ("f16", "bf16", "f32", "f64")
    if of not in floats + ("b8",) and of[0] not in "us" or instruction.has("sat") and to != "f32" or instruction.has("rm", "rp"):
        raise Unsupported(f"conversion `{instruction.text}`")

    def run(team, mask):
        value = bf16_value(get(team)) if of == "bf16" else get(team)
        if how and to in floats:
            value = how(value)
        if to in floats and instruction.has("sat"):
            value = np.fmin(np.fmax(value, 0), 1)
        if to in ("bf16", "f16") and instruction.has("rz") and value.dtype == np.float32:
            value = toward_zero(value, to)
        elif to == "bf16":
            value = bf16_bits(value)
        elif to in floats:
            value = value.astype(dtype_of(to))
        else:
            kind = np.dtype((SIGNED if to[0] == "s" else UNSIGNED)[size_of(to)])
            value = to_integer(value, kind, how or np.trunc) if value.dtype.kind == "f" else value.astype(kind)
            if wide.itemsize > kind.itemsize:
                value = value.astype(SIGNED[wide.itemsize] if to[0] == "s" else UNSIGNED[wide.itemsize])
        team.put(target, value, mask)

    return run
