"""The text of a PTX file that an entry depends on, for the digests of tests that run it."""

import re


def pieces(text):
    """The text of each entry by name, and the text common to all: headers, and variables that no entry's name begins."""
    starts = [(found.start(), found[1]) for found in re.finditer(r"^(?:\.visible )?\.entry\s+([\w$]+)", text, re.M)]
    ends = [start for start, _ in starts[1:]] + [len(text)]
    entries = {name: text[start:end] for (start, name), end in zip(starts, ends)}
    common = []
    for line in text[: starts[0][0] if starts else len(text)].splitlines():
        owners = [name for name in entries if re.search(rf"\b{re.escape(name)}_", line)]
        if owners:
            # `a_split_tokens` is of `a_split`, not of `a`.
            entries[max(owners, key=len)] += line + "\n"
        else:
            common.append(line)
    return entries, "\n".join(common)


def part(text, entry):
    """The text that a digest of an entry is made from; without an entry, that of the list of all."""
    entries, common = pieces(text)
    if not entry:
        return "\n".join(entries)
    return common + "\n" + entries[entry]
