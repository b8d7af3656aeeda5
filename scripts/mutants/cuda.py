"""Mutants of CUDA kernels: a changed copy of the sources is compiled to PTX, which the emulated card takes in place of the module that
has the same kernels (`MLA_EMULATED_PTX`), so nothing of Rust is built."""

import os
import shutil
import subprocess
import sys

from table import ROOT

KERNELS = "shaders/cuda/kernels"
COMPILE = """
import sys
from pathlib import Path
sys.path.insert(0, "scripts/ptx")
import compiler, sources
kernels, to = Path(sys.argv[1]), Path(sys.argv[2])
for name in sys.argv[3:]:
    source = sources.read(kernels / name, kernels)
    for arch in source.archs:
        (to / source.output(arch)).write_text(compiler.compile_cu(source.path, arch, kernels))
"""


def compiled(mutant, folder):
    """A folder with the PTX of a mutant. Raises CalledProcessError where nvcc refuses it."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / KERNELS, folder / "kernels")
    (folder / "ptx").mkdir()
    (folder / mutant.file.replace(KERNELS, "kernels")).write_text(mutant.changed())
    sources = mutant.source.split() or [mutant.file.removeprefix(KERNELS + "/")]
    tools = os.environ.get("CARGO_TARGET_DIR", ROOT / "target")
    env = os.environ | {"CUDA_TOOLS": os.path.realpath(f"{tools}/cuda")}
    subprocess.run([sys.executable, "-c", COMPILE, folder / "kernels", folder / "ptx", *sources], cwd=ROOT, env=env, check=True)
    return folder / "ptx"
