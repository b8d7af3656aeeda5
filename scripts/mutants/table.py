"""The mutants: what is broken, where, and which test must fail.

A table of a .toml file is a mutant by its id:

    file        what is changed
    text        what stands there, exactly once
    becomes     what stands there then
    caught_by   PROGRAM TEST: a test of `it`, of `lib` (unit tests), of `it` on the emulated `card` (scripts/ptx.sh suite), or of a test
                program of examples/generate
    why         what it stands for
    source      of a .cuh, the .cu that is compiled with it; several with spaces
    shipped     true: it runs without wgpu's run-time checks, which would hide it
    env         what the part of scripts/verify.sh sets that runs the test, as `MLA_CASES=product`
    lives       why no test can tell: the tests named by caught_by must pass

tests/it/mutants.rs checks on every run of the tests that each text is there.
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent


class Wrong(Exception):
    """The table is wrong, or a mutant could not be tried."""


@dataclass
class Mutant:
    id: str
    file: str
    text: str
    becomes: str
    caught_by: str
    why: str
    source: str = ""
    shipped: bool = False
    env: str = ""
    lives: str = ""

    @property
    def program(self):
        return self.caught_by.split(" ", 1)[0]

    @property
    def test(self):
        return self.caught_by.split(" ", 1)[1]

    @property
    def kind(self):
        suffix = Path(self.file).suffix
        return {".wgsl": "shader", ".rs": "rust", ".cu": "cuda", ".cuh": "cuda"}[suffix]

    def changed(self):
        """The file's text with the mutant in it."""
        text = (ROOT / self.file).read_text()
        if text.count(self.text) != 1:
            raise Wrong(f"{self.id}: its text is {text.count(self.text)} times in {self.file}, not once: change `text`, or take the mutant out")
        return text.replace(self.text, self.becomes)


def load():
    """All mutants, by id."""
    found = {}
    for path in sorted(HERE.glob("*.toml")):
        for id, fields in tomllib.loads(path.read_text()).items():
            if id in found:
                raise Wrong(f"{id} is twice in the tables")
            found[id] = Mutant(id, **fields)
            found[id].changed()
    return found
