"""Mutants of WGSL, without a build: a shader is a text in the test program (`include_str!`), which is replaced by another of the same length."""

import re

from table import ROOT, Wrong

# Comments that the composer reads (src/gpu/kernels/unroll.rs) stay.
MEANT = re.compile(r"unroll|all f32|// (end|if )")


def same_length(text, length):
    """The text with blanks at its end, or with less in its comments, so that it has so many bytes."""
    lines = text.encode().split(b"\n")
    for at, line in enumerate(lines):
        over = len(b"\n".join(lines)) - length
        begin = line.find(b"//")
        if over > 0 and begin >= 0 and not MEANT.search(line.decode()):
            lines[at] = line[: max(begin + 2, len(line) - over)].decode(errors="ignore").encode()
    made = b"\n".join(lines)
    if len(made) > length:
        raise Wrong("the mutant is longer than the file, whose comments have no more to give")
    return made + b" " * (length - len(made))


def patched(program, mutant):
    """The bytes of a test program with the mutant in it."""
    before, after = (ROOT / mutant.file).read_bytes(), mutant.changed()
    if before not in program:
        raise Wrong(f"{mutant.id}: the test program does not contain {mutant.file}")
    return program.replace(before, same_length(after, len(before)))
