"""PTX text into entries: parameters, shared variables, registers, and instructions with their labels resolved."""

import re
from dataclasses import dataclass, field

SIZES = {"8": 1, "16": 2, "32": 4, "64": 8, "ed": 1}
VARIABLE = re.compile(
    r"(?:\.(?:visible|extern|weak)\s+)?\.(?P<space>shared|const|global)\s+(?:\.align\s+(?P<align>\d+)\s+)?"
    r"\.(?P<type>\w+)\s+(?P<name>[\w$%]+)\s*(?P<dims>(?:\[\d*\])*)\s*(?:=\s*(?P<init>.*))?$",
    re.S,
)


class Unsupported(Exception):
    """PTX that the interpreter does not know."""


@dataclass
class Instruction:
    """`@guard opcode operands`; `name` is the opcode's first part and `mods` the rest."""

    text: str
    name: str
    mods: list
    operands: list
    guard: str = None
    guard_not: bool = False
    target: int = None

    def has(self, *mods):
        return any(mod in self.mods for mod in mods)


@dataclass
class Entry:
    """A kernel. `shared` and `data` map a variable to (offset or None if dynamic, size or bytes)."""

    name: str
    params: list = field(default_factory=list)
    registers: list = field(default_factory=list)
    code: list = field(default_factory=list)
    shared: dict = field(default_factory=dict)
    static_bytes: int = 0
    dynamic: str = None
    data: dict = field(default_factory=dict)
    threads: int = None
    # The blocks of a cluster, and whether a launch must be in clusters.
    cluster: tuple = None
    needs_cluster: bool = False


def size_of(type_name):
    return SIZES[type_name[-2:]] if type_name[-2:] in SIZES else SIZES[type_name[-1]]


def split_operands(text):
    """At the commas that no bracket holds."""
    parts, depth, start = [], 0, 0
    for at, char in enumerate(text):
        depth += (char in "{[(") - (char in "}])")
        if char == "," and depth == 0:
            parts.append(text[start:at].strip())
            start = at + 1
    last = text[start:].strip()
    return parts + [last] if last else parts


class Scopes:
    """Names of registers and labels; an inline `asm` in braces may use a name again."""

    def __init__(self):
        self.stack, self.parents, self.labels, self.count = [0], {0: None}, {0: {}}, 1
        self.registers, self.types = {0: {}}, []

    def open(self):
        self.parents[self.count], self.labels[self.count], self.registers[self.count] = self.stack[-1], {}, {}
        self.stack.append(self.count)
        self.count += 1

    def close(self):
        self.stack.pop()

    def declare(self, type_name, name):
        self.registers[self.stack[-1]][name] = len(self.types)
        self.types.append(type_name)

    def find(self, table, scope, name):
        while scope is not None:
            if name in table[scope]:
                return table[scope][name]
            scope = self.parents[scope]
        return None


def declare_registers(scopes, statement):
    type_name, names = re.fullmatch(r"\.reg\s+(?:\.v\d\s+)?\.(\w+)\s+(.*)", statement, re.S).groups()
    for name in names.split(","):
        found = re.fullmatch(r"\s*([\w$%]+)(?:<(\d+)>)?\s*", name)
        if found[2]:
            for index in range(int(found[2])):
                scopes.declare(type_name, f"{found[1]}{index}")
        else:
            scopes.declare(type_name, found[1])


def add_variable(entry, statement):
    found = VARIABLE.fullmatch(statement)
    if not found:
        raise Unsupported(f"declaration: {statement}")
    element, count = size_of(found["type"]), 1
    dims = re.findall(r"\[(\d*)\]", found["dims"])
    align = int(found["align"] or element)
    if found["space"] == "shared":
        if "" in dims:
            entry.dynamic = found["name"]
            entry.shared[found["name"]] = (None, align)
            return
        for dim in dims:
            count *= int(dim)
        start = -(-entry.static_bytes // align) * align
        entry.shared[found["name"]] = (start, element * count)
        entry.static_bytes = start + element * count
        return
    for dim in dims:
        count *= int(dim or 1)
    numbers = re.findall(r"-?\b(?:0x[0-9a-fA-F]+|\d+)\b", found["init"] or "")
    if re.search(r"[a-zA-Z_$]{3}|0[fd][0-9a-fA-F]", re.sub(r"0x[0-9a-fA-F]+", "", found["init"] or "")):
        raise Unsupported(f"initial value: {statement}")
    values = b"".join((int(n, 0) % (1 << 8 * element)).to_bytes(element, "little") for n in numbers)
    entry.data[found["name"]] = values.ljust(element * count, b"\0")


def instruction(statement):
    guard = re.match(r"@(!?)([%\w$]+)\s+", statement)
    text = statement[guard.end() :] if guard else statement
    opcode, _, rest = text.partition(" ") if " " in text.split("\t")[0] else text.partition("\t")
    name, *mods = opcode.strip().split(".")
    made = Instruction(statement, name, mods, split_operands(rest.strip()))
    if guard:
        made.guard, made.guard_not = guard[2], guard[1] == "!"
    return made


def substitute(text, scopes, scope):
    """Names of registers become `$index`."""

    def one(found):
        index = scopes.find(scopes.registers, scope, found[0])
        return found[0] if index is None else f"${index}"

    # A name begins where no constant is: `f0` is none in `0f00000000`.
    return re.sub(r"(?<![\w$%])[%A-Za-z_$][\w$.]*(?<!\.)", one, text)


def parse_body(entry, body):
    scopes, code, places = Scopes(), [], []
    for statement in body.split(";"):
        statement = statement.strip()
        while statement:
            if statement[0] == "{":
                scopes.open()
            elif statement[0] == "}":
                scopes.close()
            else:
                break
            statement = statement[1:].strip()
            # A label may stand before a brace.
        while label := re.match(r"([\w$]+):(?!:)\s*", statement):
            scopes.labels[scopes.stack[-1]][label[1]] = len(code)
            statement = statement[label.end() :].strip()
            while statement and statement[0] in "{}":
                scopes.open() if statement[0] == "{" else scopes.close()
                statement = statement[1:].strip()
        if not statement or statement.startswith((".pragma", ".loc")):
            continue
        if statement.startswith(".reg"):
            declare_registers(scopes, statement)
        elif statement.startswith("."):
            add_variable(entry, statement)
        else:
            code.append(instruction(" ".join(statement.split())))
            places.append(scopes.stack[-1])
    for made, scope in zip(code, places):
        if made.name == "bra":
            made.target = scopes.find(scopes.labels, scope, made.operands[0])
            made.operands = []
        made.operands = [substitute(operand, scopes, scope) for operand in made.operands]
        if made.guard:
            made.guard = substitute(made.guard, scopes, scope)
    entry.code, entry.registers = code, scopes.types


def matching_brace(text, start):
    depth = 0
    for found in re.compile(r"[{}]").finditer(text, start):
        depth += 1 if found[0] == "{" else -1
        if depth == 0:
            return found.start()
    raise Unsupported("a brace without its end")


def dims_after(directive, text):
    """The three numbers of a directive, or None."""
    found = re.search(rf"\.{directive}\s+(\d+)(?:,\s*(\d+))?(?:,\s*(\d+))?", text)
    return found and tuple(int(number or 1) for number in found.groups())


def parse(text):
    """The entries of a PTX text by name."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.S)
    heads = list(re.finditer(r"(?:\.visible\s+)?\.entry\s+(\w+)\s*(?:\(([^)]*)\))?([^{;]*)\{", text))
    if re.search(r"^\s*(\.visible\s+)?\.func\b", text, re.M):
        raise Unsupported("functions that are not inlined")
    module, end, bodies = "", 0, []
    for head in heads:
        module += text[end : head.start()]
        end = matching_brace(text, head.end() - 1) + 1
        bodies.append(text[head.end() : end - 1])
    entries = {}
    for head, body in zip(heads, bodies):
        entry = Entry(head[1])
        for param in re.finditer(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)\s+(?:\.ptr[^,]*?\s)?(\w+)(?:\[(\d+)\])?", head[2] or ""):
            entry.params.append((param[2], int(param[3] or 1) * size_of(param[1])))
        bound, cluster = dims_after("(?:max|req)ntid", head[3]), dims_after("reqnctapercluster", head[3])
        entry.threads = bound and bound[0] * bound[1] * bound[2]
        entry.cluster, entry.needs_cluster = cluster, ".explicitcluster" in head[3]
        for statement in re.sub(r"^\s*\.(version|target|address_size).*$", "", module + text[end:], flags=re.M).split(";"):
            if statement.strip():
                add_variable(entry, " ".join(statement.split()))
        parse_body(entry, body)
        entries[entry.name] = entry
    return entries
