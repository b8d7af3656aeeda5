"""Keeps what nvcc and ptxas gave, by a digest of all that they were given. scripts/ptx.sh's header says who may rely on it."""

import hashlib
import os
import subprocess
import tempfile
import zlib
from functools import cache as once
from pathlib import Path

import compiler
from sources import included

FOLDER = compiler.TOOLS / "cache"


def kept(given, make):
    """The text that `make()` gave when it was last asked with the same `given`, a list of texts. Errors are not kept."""
    digest = hashlib.sha256()
    for text in [pins(), *given]:
        digest.update(f"{len(text.encode())} {text}".encode())
    path = FOLDER / digest.hexdigest()
    if path.exists():
        return zlib.decompress(path.read_bytes()).decode()
    text = make()
    FOLDER.mkdir(exist_ok=True)
    # Two runs may write the same file, and one may be stopped: a file is whole once it has its name.
    with tempfile.NamedTemporaryFile(dir=FOLDER, delete=False) as file:
        file.write(zlib.compress(text.encode()))
    os.replace(file.name, path)
    return text


@once
def pins():
    """Versions and hashes of compiler and assemblers, as scripts/ptx.sh installed them."""
    return (compiler.TOOLS / "ready").read_text()


@once
def preprocessor():
    """The version of the host's compiler, with whose headers nvcc preprocesses."""
    return subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True).stdout


def nvcc(path, arch, include):
    """What nvcc writes of a .cu, which depends on the texts of all files that it includes and on their names."""
    files = [item for file in included(path, include) for item in (os.path.relpath(file, include), file.read_text())]
    given = ["nvcc", preprocessor(), *compiler.options(arch), path.name, *files]
    return kept(given, lambda: compiler.nvcc(path, arch, include))
