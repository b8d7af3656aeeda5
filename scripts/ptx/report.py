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


def tsv(table):
    """A line for each entry, assembler and card."""
    lines = ["file\tentry\tptxas\tcard\tregisters\tstatic shared\tcode"]
    for (file, entry), (_, results) in table.items():
        for (name, card), usage in results.items():
            numbers = f"{usage.registers}\t{usage.static}\t{usage.code}"
            lines.append(f"{file}\t{entry}\t{name}\t{card}\t{numbers}")
    return "\n".join(lines) + "\n"


def read_tsv(path, sources):
    """The table that a committed tsv was made of. `sources` has those of the PTX files, by their names."""
    table = {}
    for line in path.read_text().splitlines()[1:]:
        file, entry, name, card, registers, static, code = line.split("\t")
        if file in sources and (limits := sources[file].limits_of(entry)):
            usage = Usage(registers=int(registers), static=int(static), code=int(code))
            table.setdefault((file, entry), (limits[1], {}))[1][name, card] = usage
    return table
