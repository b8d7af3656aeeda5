"""Arithmetic, logic, comparisons and moves. Denormals are kept where `.ftz` would flush them."""

import numpy as np

from convert import bf16_bits, bf16_value
from operands import SIGNED, UNSIGNED, dtype_of, elements, register, source
from parse import Unsupported, size_of

TYPE_NAMES = {"pred", "f16", "bf16", "f16x2", "bf16x2", "f32", "f64"} | {k + b for k in "bus" for b in ("8", "16", "32", "64")}


def decode(machine, instruction):
    name = instruction.name
    if name == "mov":
        return move(machine, instruction)
    if name == "setp":
        return compare(machine, instruction)
    if name in ("mul", "mad") and instruction.has("wide", "hi"):
        return wide_product(machine, instruction)
    if name in PLAIN:
        return plain(machine, instruction)
    return None


def type_of(instruction):
    return next(mod for mod in reversed(instruction.mods) if mod in TYPE_NAMES)


def operation(machine, instruction, types, compute):
    """`compute` of the source operands, each read as its type, into the first operand."""
    target = register(instruction.operands[0])
    gets = [source(machine, text, kind) for text, kind in zip(instruction.operands[1:], types, strict=True)]
    if len(gets) == 1:
        (only,) = gets
        return lambda team, mask: team.put(target, compute(only(team)), mask)
    if len(gets) == 2:
        left, right = gets
        return lambda team, mask: team.put(target, compute(left(team), right(team)), mask)
    return lambda team, mask: team.put(target, compute(*(get(team) for get in gets)), mask)


def halves(compute):
    """Of two f16 in 32 bits."""

    def run(*packed):
        # A constant is one word, and becomes one pair.
        pairs = [np.ascontiguousarray(value).view(np.float16).reshape(-1, 2) for value in packed]
        return np.ascontiguousarray(compute(*pairs).astype(np.float16)).view(np.uint32).reshape(-1)

    return run


def brains(compute):
    """Of bf16 bits: computed in f32, then rounded."""
    return lambda *bits: bf16_bits(compute(*(bf16_value(value) for value in bits)))


def two_brains(compute):
    def run(*packed):
        low = bf16_bits(compute(*(bf16_value(value.astype(np.uint16)) for value in packed)))
        high = bf16_bits(compute(*(bf16_value((value >> 16).astype(np.uint16)) for value in packed)))
        return low.astype(np.uint32) | (high.astype(np.uint32) << np.uint32(16))

    return run


def divide(left, right):
    """Toward zero, as C does. A division by zero gives all ones."""
    if left.dtype.kind == "f":
        return left / right
    nonzero = np.where(right == 0, right.dtype.type(1), right)
    quotient = left // nonzero
    if left.dtype.kind == "i":
        quotient = quotient + ((quotient * nonzero != left) & ((left < 0) != (nonzero < 0)))
    return np.where(right == 0, left.dtype.type(-1) if left.dtype.kind == "i" else ~left.dtype.type(0), quotient).astype(left.dtype)


def remainder(left, right):
    return np.where(right == 0, left, left - divide(left, right) * right).astype(left.dtype)


def fused(a, b, c):
    """Exact for f16 and, but for ties of the second rounding, for f32."""
    wide = np.float64 if a.dtype != np.float64 else np.longdouble
    return (a.astype(wide) * b.astype(wide) + c.astype(wide)).astype(a.dtype)


def shift_left(value, by):
    bits = 8 * value.dtype.itemsize
    moved = value << np.minimum(by, bits - 1).astype(value.dtype)
    return np.where(by < bits, moved, value.dtype.type(0))


def shift_right(value, by):
    bits = 8 * value.dtype.itemsize
    moved = value >> np.minimum(by, bits - 1).astype(value.dtype)
    return moved if value.dtype.kind == "i" else np.where(by < bits, moved, value.dtype.type(0))


def funnel(left):
    def run(low, high, by, clamp):
        both = (high.astype(np.uint64) << np.uint64(32)) | low.astype(np.uint64)
        by = (np.minimum(by, 32) if clamp else by & np.uint32(31)).astype(np.uint64)
        return ((both << by) >> np.uint64(32) if left else both >> by).astype(np.uint32)

    return run


def field_mask(position, length, bits):
    """`length` ones from `position` on, within `bits`; Python's integers, since all lanes mostly have the same."""
    return ((1 << min(length, bits)) - 1) << position & ((1 << bits) - 1)


def each(compute):
    """A function of integers over arrays, one lane after the other."""

    def run(*values):
        values = np.broadcast_arrays(*values)
        kind = values[0].dtype
        bits = 8 * kind.itemsize
        found = [compute(bits, *(int(value) for value in lane)) % (1 << bits) for lane in zip(*values)]
        return np.array(found, UNSIGNED[kind.itemsize]).view(kind)

    return run


def bit_extract(signed):
    def run(bits, value, position, length):
        position, length = position & 255, length & 255
        found = (value >> position) & ((1 << length) - 1) if position < bits else 0
        if not signed or length == 0:
            return found
        top = min(position + length - 1, bits - 1)
        return found - (1 << length) if (value >> top) & 1 and length < bits else found

    return run


def bit_insert(bits, field, into, position, length):
    position, length = position & 255, length & 255
    ones = field_mask(position, length, bits) if position < bits else 0
    return (into & ~ones) | (field << position & ones)


def highest(value):
    """The place of the highest bit that is not the sign, or -1."""
    return (value if value >= 0 else ~value).bit_length() - 1


def permute(a, b, selector):
    """`prmt`: four bytes out of eight; the selector's high bit repeats a byte's sign."""
    both = (b.astype(np.uint64) << np.uint64(32)) | a.astype(np.uint64)
    out = np.zeros(both.shape, np.uint32)
    for index in range(4):
        choice = (selector >> np.uint32(4 * index)) & np.uint32(15)
        byte = (both >> ((choice & np.uint32(7)).astype(np.uint64) * np.uint64(8))).astype(np.uint32) & np.uint32(255)
        sign = np.where(byte & np.uint32(128), np.uint32(255), np.uint32(0))
        out = out | (np.where(choice & np.uint32(8), sign, byte) << np.uint32(8 * index))
    return out


def logic3(table):
    def run(a, b, c):
        out = np.zeros_like(a | b | c)
        for index in range(8):
            if table >> index & 1:
                out = out | ((a if index & 4 else ~a) & (b if index & 2 else ~b) & (c if index & 1 else ~c))
        return out

    return run


# By name: the computation of operands that all have the instruction's type.
PLAIN = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "mad": lambda a, b, c: a * b + c,
    "fma": fused,
    "div": divide,
    "rem": remainder,
    "abs": np.abs,
    "neg": lambda a: -a,
    "min": np.fmin,
    "max": np.fmax,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "not": lambda a: ~a,
    "cnot": lambda a: (a == 0).astype(a.dtype),
    "shl": shift_left,
    "shr": shift_right,
    "shf": None,
    "lop3": None,
    "selp": lambda a, b, chosen: np.where(chosen, a, b),
    "prmt": permute,
    "bfe": None,
    "bfi": each(bit_insert),
    "brev": each(lambda bits, value: int(f"{value:0{bits}b}"[::-1], 2)),
    "clz": each(lambda bits, value: bits - value.bit_length()),
    "popc": each(lambda bits, value: value.bit_count()),
    "bfind": each(lambda bits, value: highest(value)),
    "sad": lambda a, b, c: np.where(a > b, a - b, b - a) + c,
    "rcp": lambda a: a.dtype.type(1) / a,
    "sqrt": np.sqrt,
    "rsqrt": lambda a: a.dtype.type(1) / np.sqrt(a),
    "ex2": np.exp2,
    "lg2": np.log2,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
    "copysign": lambda sign, size: np.copysign(size, sign),
}
# Operands that do not have the instruction's type.
OTHER_TYPES = {"shl": {1: "u32"}, "shr": {1: "u32"}, "selp": {2: "pred"}, "bfe": {1: "u32", 2: "u32"}, "bfi": {2: "u32", 3: "u32"}}


def plain(machine, instruction):
    name, type_name = instruction.name, type_of(instruction)
    if instruction.has("cc") or name in ("addc", "subc", "madc"):
        return None
    compute, operands = PLAIN[name], instruction.operands
    if name == "lop3":
        compute, instruction.operands = logic3(int(operands[-1], 0)), operands[:-1]
    elif name == "bfe":
        compute = each(bit_extract(type_name[0] == "s"))
    elif name == "shf":
        run, clamp = funnel(instruction.has("l")), instruction.has("clamp")
        compute = lambda low, high, by: run(low, high, by, clamp)  # noqa: E731
    elif name == "bfind" and instruction.has("shiftamt"):
        compute = each(lambda bits, value: bits - 1 - highest(value) if highest(value) >= 0 else -1)
    elif name in ("min", "max") and instruction.has("NaN"):
        compute = {"min": np.minimum, "max": np.maximum}[name]
    elif name == "fma" and instruction.has("relu"):
        compute = lambda a, b, c: np.fmax(fused(a, b, c), a.dtype.type(0))  # noqa: E731
    if name in ("popc", "clz", "bfind") and size_of(type_name) == 8:
        compute = lambda value, run=compute: run(value).astype(np.uint32)  # noqa: E731
    if instruction.has("sat"):
        saturated = compute
        compute = lambda *args: np.fmin(np.fmax(saturated(*args), np.float32(0)), np.float32(1))  # noqa: E731
    if name not in ("and", "or", "xor", "not", "selp", "lop3"):
        wrapped = {"f16x2": halves, "bf16": brains, "bf16x2": two_brains}.get(type_name)
        compute = wrapped(compute) if wrapped else compute
    others = OTHER_TYPES.get(name, {})
    count = len(instruction.operands) - 1
    return operation(machine, instruction, [others.get(index, type_name) for index in range(count)], compute)


def wide_product(machine, instruction):
    """`mul.wide`, whose sum has twice the bits, and `mul.hi`."""
    type_name = type_of(instruction)
    size = size_of(type_name)
    kinds = SIGNED if type_name[0] == "s" else UNSIGNED
    double = f"{type_name[0]}{size * 16}"

    def high(a, b):
        if size < 8:
            wide = kinds[2 * size]
            return ((a.astype(wide) * b.astype(wide)) >> wide(8 * size)).astype(a.dtype)
        return each(lambda bits, x, y: (x * y) >> bits)(a, b)

    if instruction.has("hi"):
        compute = high if instruction.name == "mul" else lambda a, b, c: high(a, b) + c
        return operation(machine, instruction, [type_name] * (len(instruction.operands) - 1), compute)
    wide = kinds[2 * size]
    if instruction.name == "mul":
        return operation(machine, instruction, [type_name] * 2, lambda a, b: a.astype(wide) * b.astype(wide))
    types = [type_name, type_name, double]
    return operation(machine, instruction, types, lambda a, b, c: a.astype(wide) * b.astype(wide) + c)


ORDERED = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "lo": lambda a, b: a < b,
    "ls": lambda a, b: a <= b,
    "hi": lambda a, b: a > b,
    "hs": lambda a, b: a >= b,
}


def comparison(name, floating):
    if name in ("num", "nan"):
        return lambda a, b: (np.isnan(a) | np.isnan(b)) == (name == "nan")
    if floating and name.endswith("u") and name[:-1] in ORDERED:
        test = ORDERED[name[:-1]]
        return lambda a, b: test(a, b) | np.isnan(a) | np.isnan(b)
    if floating and name == "ne":
        return lambda a, b: (a != b) & ~np.isnan(a) & ~np.isnan(b)
    return ORDERED[name]


def compare(machine, instruction):
    """`setp`, with the two destinations and the predicate that it may have."""
    type_name = type_of(instruction)
    if "16" in type_name and type_name[0] in "fb" and type_name not in ("f16", "b16"):
        raise Unsupported(f"setp.{type_name}")
    test = comparison(instruction.mods[0], type_name[0] == "f")
    targets = [register(text) if text != "_" else None for text in instruction.operands[0].split("|")]
    left, right = (source(machine, text, type_name) for text in instruction.operands[1:3])
    joins = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}
    join = next((joins[mod] for mod in instruction.mods[1:] if mod in joins), None)
    third = instruction.operands[3] if join else None
    negated = bool(third) and third[0] == "!"
    get = source(machine, third.lstrip("!"), "pred") if join else None

    def run(team, mask):
        found = test(left(team), right(team))
        for target, value in zip(targets, (found, ~found)):
            if join:
                other = get(team)
                value = join(value, ~other if negated else other)
            if target is not None:
                team.put(target, value, mask)

    return run


def move(machine, instruction):
    """`mov`, which also packs and unpacks."""
    to, of = instruction.operands
    type_name = type_of(instruction)
    if to[0] != "{" and of[0] != "{":
        return operation(machine, instruction, [type_name], lambda value: value)
    if to[0] == "{":
        targets = [None if text == "_" else register(text) for text in elements(to)]
        get = source(machine, of, type_name)
        part = UNSIGNED[size_of(type_name) // len(targets)]

        def unpack(team, mask):
            value = np.broadcast_to(get(team), team.lanes)
            parts = np.ascontiguousarray(value).view(part).reshape(team.lanes, -1)
            for index, target in enumerate(targets):
                if target is not None:
                    team.put(target, parts[:, index].copy(), mask)

        return unpack
    names = elements(of)
    part = size_of(type_name) // len(names)
    gets = [source(machine, text, f"u{part * 8}") for text in names]
    whole, target = dtype_of(type_name), register(to)

    def pack(team, mask):
        parts = np.stack([np.broadcast_to(get(team), team.lanes) for get in gets], 1)
        team.put(target, np.ascontiguousarray(parts).view(whole).reshape(-1), mask)

    return pack


