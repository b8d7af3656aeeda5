"""Compiles a .cu with nvcc to PTX that is the same on every machine."""

import os
import re
import subprocess
from collections import Counter
from itertools import islice, product
from pathlib import Path
from string import ascii_letters, ascii_uppercase

TOOLS = Path(os.environ.get("CUDA_TOOLS", "target/cuda")).resolve()
NVCC = TOOLS / "nvcc-13.0/nvidia/cu13/bin/nvcc"
FLAGS = ["-O3", "-std=c++17", "-Werror", "all-warnings"]
# The prefix of instructions for compute capability 9.0 and later: programmatic dependent launch.
WAITS = "// sm_90: "
# nvcc's registers by kind, as `%rd266`, and the first letter of each in the committed PTX; other letters follow as they are needed.
LETTERS = {"r": "r", "rd": "d", "rs": "h", "f": "f", "fd": "e", "p": "p"}
OTHERS = [letter for letter in ascii_letters if letter not in LETTERS.values()]
REGISTER = re.compile(rf"%({'|'.join(LETTERS)})(\d+)\b")


def compile_cu(path, arch, include=None):
    """The PTX of a .cu for a virtual architecture, in the form in which it is committed. `include` is where the paths begin that it
    includes from other folders. Raises RuntimeError."""
    return normal(nvcc(path, arch, include), path.name, arch)


def options(arch):
    return ["-ptx", f"-arch={arch.name}", *FLAGS]


def nvcc(path, arch, include=None):
    """What nvcc writes."""
    # The folder is nvcc's own, so that the path in its messages, and in what it derives from it, is the name alone.
    includes = ["-I", include.resolve()] if include else []
    command = [NVCC, *options(arch), *includes, path.name, "-o", "-"]
    done = subprocess.run(command, cwd=path.parent, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"nvcc of {path.name} for {arch.name}:\n{done.stderr or done.stdout}")
    return done.stdout


def normal(text, name, arch):
    """The text without comments, empty lines and blanks that PTX does not need, which are a tenth of it, with short names of labels, parameters and
    registers, which are an entry's own, and with the lowest `.version` that loads. `// sm_90: ` comments stay, for `for_card`."""
    lines = (re.sub(r"\s*//(?! sm_90: ).*", "", line) for line in text.splitlines())
    lines = (re.sub(r"([,;]) ", r"\1", " ".join(line.split())) for line in lines)
    # A hint to ptxas that needs PTX 8.3, unlike the rest.
    text = "\n".join(line for line in lines if line and "used_bytes_mask" not in line)
    text = re.sub(r"\$L__BB\d+_", "$L", re.sub(r"\b\w+_param_(\d)\b", r"args\1", text))
    text, found = re.subn(r"^\.version .*$", ".version {}.{}".format(*arch.version), text, flags=re.M)
    if found != 1:
        raise RuntimeError(f"nvcc of {name}: no `.version`")
    # A path would differ elsewhere; so does the hash in the names of static device variables.
    for unwanted in ("/", "_INTERNAL_", ".loc", ".file"):
        if unwanted in text.replace(WAITS, ""):
            line = next(line for line in text.splitlines() if unwanted in line)
            raise RuntimeError(f"nvcc of {name}: `{unwanted}` in its PTX: {line.strip()}")
    return f"// Written by scripts/ptx.sh from {name}: nvcc 13.0.88, {arch.name}.\n{short_registers(text)}\n"


def short_registers(text):
    """The text with `%rd1266` as `d9` or `Q7`: a letter and at most two digits, the shortest names for those that an entry names most often,
    which is a fourth less of it. ptxas makes the same code of it: it does not go by names of registers."""
    if taken := re.search(r"(?<![\w.$%])(?:[a-zA-Z]|[A-Z]{2})\d+\b", text):
        raise RuntimeError(f"`{taken[0]}` in inline asm has the form of a register's name: call it otherwise")
    head, *own = re.split(r"^(?=\.visible \.entry )", text, flags=re.M)
    return head + "".join(map(short_registers_of_entry, own))


def short_registers_of_entry(text):
    often = Counter(REGISTER.findall(text))
    by_kind = {kind: [] for kind in LETTERS}
    for register in sorted(often, key=lambda one: (-often[one], int(one[1]))):
        by_kind[register[0]].append(register)
    names, declared = {}, {}
    for kind, prefixes in prefixes_of(by_kind, often).items():
        each = -(-len(by_kind[kind]) // len(prefixes))
        short = sorted((f"{prefix}{number}" for number in range(each) for prefix in prefixes), key=len)
        names |= {f"%{kind}{number}": name for (_, number), name in zip(by_kind[kind], short)}
        declared[kind] = ",".join(f"{prefix}<{each}>" for prefix in prefixes)
    line = lambda found: f"{found[1]} {declared[found[2]]};\n" if found[2] in declared else ""
    text = re.sub(r"^(\.reg \.\w+) %([a-z]+)<\d+>;\n", line, text, flags=re.M)
    return REGISTER.sub(lambda found: names[found[0]], text)


def prefixes_of(by_kind, often):
    """By kind: what its names begin with. A hundred names have a prefix, and ten where the letters suffice: those with one digit are shorter."""
    needed = {kind: -(-len(found) // 100) for kind, found in by_kind.items() if found}
    spare = len(OTHERS) - sum(needed.values()) + len(needed)
    tens = [
        (-sum(often[one] for one in by_kind[kind][10 * at : 10 * at + 10]), kind)
        for kind, least in needed.items()
        for at in range(least, -(-len(by_kind[kind]) // 10))
    ]
    # A prefix costs seven characters where it is declared.
    for gain, kind in sorted(tens)[: max(spare, 0)]:
        needed[kind] += gain < -7
    letters = iter([*OTHERS, *map("".join, product(ascii_uppercase, repeat=2))])
    return {kind: [LETTERS[kind], *islice(letters, count - 1)] for kind, count in needed.items()}


def for_card(ptx, number):
    """The PTX that the host loads on a card: from sm_90 on, with the instructions after `// sm_90: `. See src/cuda/kernels/ptx.rs."""
    if number < 90 or WAITS not in ptx:
        return ptx
    ptx = ptx.replace(WAITS, "").replace(".target sm_80", ".target sm_90").replace(".target sm_89", ".target sm_90")
    return ptx.replace(".version 7.0", ".version 7.8")


def entries(ptx):
    """The entries of a PTX text, each with the threads of its launch bounds or None."""
    found = {}
    for name, head in re.findall(r"\.entry\s+(\w+)\s*(?:\([^)]*\))?([^{]*)\{", ptx):
        bound = re.search(r"\.(?:max|req)ntid\s+(\d+)(?:,\s*(\d+))?(?:,\s*(\d+))?", head)
        found[name] = bound and int(bound[1]) * int(bound[2] or 1) * int(bound[3] or 1)
    return found


def constants(ptx, what):
    """By entry: the constant `ENTRY_what`, of those that have one beside them."""
    return {name: int(value) for name, value in re.findall(rf"\b(\w+)_{what} = (\d+);", ptx)}
