"""The CUDA kernels in an interpreter. A unit is a test; it runs again when the interpreter, or an entry that it read, has changed."""

import ast
import platform
import re
import tempfile
from pathlib import Path

from part import Part, Passed, run as run_command
from records import ROOT, Failed, digest, digest_of_file, files

TESTS = ["scripts/ptxemu/tests/test_*.py", "scripts/ptxemu/kernels_*.py"]


def local_imports(path):
    """A module and those beside it that it imports, and so on."""
    found = [path]
    for file in found:
        for name in re.findall(r"^(?:from|import) (\w+)", (ROOT / file).read_text(), re.M):
            other = f"scripts/ptxemu/{name}.py"
            if other not in found and (ROOT / other).exists():
                found.append(other)
    return found


def tests_of(path):
    """Its tests, and which of them are left to --full."""
    functions = [node for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    is_long = lambda function: any(getattr(decorator, "id", "") == "long" for decorator in function.decorator_list)
    return {f"{Path(path).stem}.{function.name}": is_long(function) for function in functions}


def units():
    scripts = files("scripts/ptxemu/run.py", "scripts/ptxemu/launch.py", "scripts/ptxemu/entries.py", "scripts/ptx/numpy.txt", "scripts/verify/parts/emulate.py")
    found = {}
    for path in files(*TESTS):
        inputs = [*scripts, *local_imports(path)]
        if "/tests/" in path:
            inputs += files("scripts/ptxemu/tests/*.cu", "scripts/ptx/compiler.py", "scripts/ptx/nvcc-*.txt", "scripts/ptxemu/*.py")
        found |= {name: inputs for name, is_long in tests_of(path).items() if not is_long}
    return found


class Emulate(Part):
    def digest(self, inputs, traced):
        """With the text of each entry that the test read."""
        from entries import part

        entries = []
        for item in traced:
            path, entry = item.split(":")
            entries.append((item, part((ROOT / path).read_text(), entry)))
        return digest([*inputs, *entries])


def run(stale, full, log):
    names = list(stale)
    if full:
        names += [name for path in files(*TESTS) for name, is_long in tests_of(path).items() if is_long]
    with tempfile.NamedTemporaryFile("r", suffix=".tsv") as report:
        status, _ = run_command(log, "scripts/ptx.sh", "emulate", "--exact", "--report", report.name, *names, minutes=600 if full else 60)
        lines = [line.rstrip("\n").split("\t") for line in report]
    passed = {name: Passed(1, read.split()) for name, read in lines if name in stale}
    if status and len(passed) == len(stale):
        raise Failed("a test of --full failed") from None
    return passed


PART = Emulate("emulate", "the CUDA kernels in an interpreter", 25, units, run, lambda: {"python": ".".join(platform.python_version_tuple()[:2])})
