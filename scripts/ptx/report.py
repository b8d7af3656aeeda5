"""Writes the assemblers' results as benches/results/ptx.md, and in full as ptx.tsv."""

from assembler import ASSEMBLERS, Usage

CARDS = ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120"]
# Shared memory that a block may have, in bytes, and what the system keeps of it for itself.
SHARED = {"sm_80": 166912, "sm_86": 101376, "sm_89": 101376, "sm_120": 101376}
SHARED_ELSE = 232448

HEAD = """# CUDA kernels: what the assemblers give

Written by `scripts/ptx.sh`: nvcc 13.0.88, then ptxas of CUDA 12.4, 12.8 and 13.0 for each card. Assembled, not run. No
entry spills or has a stack frame; one that did, or took more registers than `limit`, would fail the check.

Registers are a thread's; where the three assemblers differ, the lowest and the highest. A kernel for one card alone (`sm_90a`) stands in that
card's column. `-`: not for this card, or more shared memory than a block has there. Shared memory is static + dynamic bytes of a block, code is bytes for sm_90 by
ptxas 13.0 (or the newest card that it serves). [ptx.tsv](ptx.tsv) has every assembler and card.
"""


def fits(card, usage):
    """Whether a block of the entry fits the card's shared memory."""
    return usage.static + usage.dynamic <= SHARED.get(card, SHARED_ELSE)


def span(values):
    """`lowest`, or `lowest-highest`."""
    return f"{min(values)}-{max(values)}" if min(values) != max(values) else f"{min(values)}"


def row(file, entry, limits, results):
    """One line of the table. `results` maps (assembler, card) to a usage."""
    cells = []
    for card in CARDS:
        seen = [usage for (_, target), usage in results.items() if target in (card, f"{card}a")]
        seen = [usage for usage in seen if fits(card, usage)]
        cells.append(span([usage.registers for usage in seen]) if seen else "-")
    newest = ASSEMBLERS[-1].name
    shown = results.get((newest, "sm_90")) or [usage for (name, _), usage in results.items() if name == newest][-1]
    shared = f"{shown.static} + {shown.dynamic}"
    return f"| {file} | {entry} | {limits.threads} | {limits.registers} | {' | '.join(cells)} | {shared} | {shown.code} |"


def markdown(table):
    """`table` maps (file, entry) to (limits, results)."""
    lines = [HEAD, f"| file | entry | threads | limit | {' | '.join(CARDS)} | shared | code |"]
    lines.append("|---|---|" + "---:|" * (len(CARDS) + 4))
    lines += [row(file, entry, *rest) for (file, entry), rest in table.items()]
    return "\n".join(lines) + "\n"


# An assembler and a card: the columns of the full table.
COLUMNS = [(assembler.name, card) for assembler in ASSEMBLERS for card in [*CARDS, "sm_90a"]]


def tsv(table):
    """A line for each entry: for each assembler and card its registers, bytes of static shared memory, and bytes of code."""
    lines = ["\t".join(["file", "entry", *(f"{name} {card}" for name, card in COLUMNS)])]
    for (file, entry), (_, results) in table.items():
        assert results.keys() <= set(COLUMNS), f"{file} {entry}: an assembler or a card without a column"
        cells = [f"{usage.registers} {usage.static} {usage.code}" if (usage := results.get(column)) else "" for column in COLUMNS]
        lines.append("\t".join([file, entry, *cells]))
    return "\n".join(lines) + "\n"


def digests(table):
    """A line for each entry, assembler and card: a digest of the code."""
    found = ((*key, *place, usage.digest) for key, (_, results) in table.items() for place, usage in results.items())
    return "".join("\t".join(line) + "\n" for line in found)


def read_tsv(path, sources):
    """The table that a committed tsv was made of. `sources` has those of the PTX files, by their names."""
    table = {}
    for line in path.read_text().splitlines()[1:]:
        file, entry, *cells = line.split("\t")
        if file in sources and (limits := sources[file].limits_of(entry)):
            usages = (Usage(**dict(zip(("registers", "static", "code"), map(int, cell.split())))) if cell else None for cell in cells)
            table[file, entry] = (limits[1], {column: usage for column, usage in zip(COLUMNS, usages, strict=True) if usage})
    return table
