"""The variants on cooperative matrices, run by Mesa 26's lavapipe, which has 8x8. A unit is an op."""

import re

from lavapipe import inputs, ops
from part import Part, Passed, locked, run as run_command
from records import files
from tree import tools

OPS = ops()
BATCH_TABLES = (["batch_tables"], ["tests/it/batch_tables/*.rs", "tests/support/src/reference/batch_tables.rs"])
DECODE = (OPS["decode"][0], [*OPS["decode"][1], "src/gpu/host.rs", "src/gpu/wanted.rs", "tests/it/devices/made.rs"])
PROJECT = (OPS["head_project"][0], [*OPS["head_project"][1], "tests/it/head_project.rs"])


def units():
    scripts = [*files("scripts/vendors.sh", "scripts/verify/parts/mesa26.py"), *locked("naga", "wgpu")]
    return {op: [*scripts, *inputs(*of)] for op, of in {"decode": DECODE, "head_project": PROJECT, "batch_tables": BATCH_TABLES}.items()}


def run(stale, full, log):
    passed = {}
    for op in stale:
        status, said = run_command(log, "scripts/vendors.sh", "mesa26", op, minutes=600 if full else 60)
        if status == 0:
            passed[op] = Passed(len(re.findall(r"^test \S+\s+\.\.\. ok$", said, re.M)))
    return passed


PART = Part("mesa26", "the kernels on matrices, on Mesa 26's software driver", 15, units, run, tools)
