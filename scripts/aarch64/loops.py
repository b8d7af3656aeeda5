#!/usr/bin/env python3
"""The inner loops of the decode's NEON kernel in a library for aarch64: instructions for each fused multiply-add of four lanes.

    loops.py LIBRARY.rlib

No time can be measured without such a processor, so this holds the compiler to what the kernel is written for. A loop of a tile of three
rows or more may have MOST instructions for each multiply-add, none of which touches the stack or calls a function: 24 sums that do not
fit the registers, or a shape that is vectorised in another way, are found. Smaller tiles read almost as many vectors as they multiply."""

import re
import subprocess
import sys

OBJDUMP = "aarch64-linux-gnu-objdump"
MOST = 1.9
# Sums of the largest tile, 6 rows x 4 vectors, and of the smallest one that is held to MOST: 3 x 4.
LARGEST, HELD = 24, 12

FUNCTION = re.compile(r"^[0-9a-f]+ <(.*)>:$")
INSTRUCTION = re.compile(r"^\s*([0-9a-f]+):\s+(\S+)\s*(.*)$")
BRANCH = re.compile(r"^(?:b(?:\.\w+)?|cbn?z|tbn?z)$")


def functions(listing):
    """The instructions of each function by its name: address, mnemonic and operands."""
    found, code = {}, []
    for line in listing.splitlines():
        if name := FUNCTION.match(line):
            code = found.setdefault(name[1], [])
        elif instruction := INSTRUCTION.match(line):
            code.append((int(instruction[1], 16), instruction[2], instruction[3]))
    return found


def inner_loops(code):
    """Ranges of instructions that a branch backwards repeats, without those that have another such range within."""
    place = {address: at for at, (address, _, _) in enumerate(code)}
    loops = set()
    for at, (_, name, operands) in enumerate(code):
        to = BRANCH.match(name) and re.search(r"([0-9a-f]+) <", operands)
        if to and place.get(int(to[1], 16), at + 1) <= at:
            loops.add((place[int(to[1], 16)], at))
    return sorted(a for a in loops if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in loops))


def main(library):
    listing = subprocess.run([OBJDUMP, "-d", "--no-show-raw-insn", library], stdout=subprocess.PIPE, text=True, check=True).stdout
    kernels = {name: code for name, code in functions(listing).items() if re.search(r"4neon6attend", name)}
    if len(kernels) != 1:
        sys.exit(f"loops.py: {library} has {len(kernels)} functions neon::attend, which must be one")
    wrong, held, largest = [], 0, 0
    for code in kernels.values():
        for first, last in inner_loops(code):
            body = code[first : last + 1]
            products = sum(name == "fmla" and ".4s" in operands for _, name, operands in body)
            if not products:
                continue
            ratio = len(body) / products
            on_stack = sum(bool(re.search(r"\[sp\b", operands)) for _, _, operands in body)
            calls = sum(name in ("bl", "blr") for _, name, _ in body)
            print(f"loop at {code[first][0]:#x}: {len(body)} instructions for {products} fmla, {ratio:.2f}; {on_stack} on the stack, {calls} calls")
            if products < HELD:
                continue
            held += 1
            largest += products % LARGEST == 0
            if ratio > MOST or on_stack or calls:
                wrong.append(f"the loop at {code[first][0]:#x}")
    if largest < 2:
        wrong.append(f"{largest} loops of {LARGEST} fmla, where dots and values have one each")
    if wrong:
        sys.exit(f"loops.py: {'; '.join(wrong)}: at most {MOST} instructions for each fmla, none on the stack, no call")
    print(f"loops: {held} loops passed")


if __name__ == "__main__":
    main(*sys.argv[1:])
