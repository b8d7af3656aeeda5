"""The crate in a browser: lints for wasm32, the tests of tests/web, whose units are modules, and the page of examples/web."""

import re

import kernels
from part import RUSTC, Part, Passed, locked, run as run_command, version_of, versions
from records import files

SMALL = ["merge_state", "kv_append", "kv_copy_pages"]
# Kernels and other files that a module depends on.
MODULES = {
    "case_files": (["decode_plain", *SMALL], ["tests/cases/*"]),
    "decode": (["decode_plain"], []),
    "ops": (SMALL, ["tests/support/src/suite/ops.rs"]),
    "shaders": (list(kernels.RUST), []),
    "cpu": ([], ["src/cpu/**/*.rs", "tests/support/src/suite/decode.rs", "tests/support/src/suite/ops.rs"]),
}
COMMON = ["scripts/web.sh", "scripts/std.sh", "scripts/verify/parts/web.py", "tests/web/web.rs", "tests/web/page.rs", "tests/web/must_fail.rs", "tests/web/Cargo.toml", "tests/support/Cargo.toml", "tests/support/src/*.rs"]


PAGE_SOURCES = ["examples/web/Cargo.toml", "examples/web/src/*.rs", "examples/generate/Cargo.toml", "examples/generate/src/*.rs"]


def units():
    found = {"lints": files("Cargo.toml", "Cargo.lock", "src/**/*.rs", "tests/web/*.rs", "tests/support/**/*.rs", *PAGE_SOURCES, *COMMON)}
    for module, (ops, more) in MODULES.items():
        paths = {path for op in ops for path in kernels.inputs_of(op)} | set(files(f"tests/web/{module}.rs", *COMMON, *more))
        found[module] = [*sorted(paths), *locked("naga", "wgpu", "wasm-bindgen")]
    model = ["examples/generate/model/*", "examples/generate/tests/goldens/*", "examples/generate/data/held_out.txt"]
    sources = ["Cargo.toml", "Cargo.lock", "src/**/*.rs", "shaders/*.wgsl", "shaders/lib/*.wgsl", "tests/support/Cargo.toml", "tests/support/src/reference.rs", "tests/support/src/reference/*.rs"]
    found["page"] = files(*sources, *PAGE_SOURCES, *model, "examples/web/static/*", "scripts/web.sh", "scripts/std.sh", "scripts/web_page.py", "scripts/verify/parts/web.py")
    return found


def run(stale, _full, log):
    passed = {}
    if "lints" in stale:
        status, _ = run_command(log, "scripts/web.sh", "--lints")
        if status == 0:
            passed["lints"] = Passed(1)
    if "page" in stale:
        status, said = run_command(log, "scripts/web.sh", "page", "--test")
        if status == 0:
            passed["page"] = Passed(len(re.findall(r"^ok  ", said, re.M)))
    modules = [module for module in MODULES if module in stale]
    if modules:
        # All modules run in one page, which shares its pipelines.
        filters = [] if len(modules) == len(MODULES) else [f"{module}::" for module in modules]
        status, said = run_command(log, "scripts/web.sh", *filters)
        for module in modules if status == 0 else []:
            passed[module] = Passed(len(set(re.findall(rf"test ({module}::\w+) \.\.\. ok", said))))
    return passed


def tools():
    chromium = version_of(["dpkg-query", "-W", "-f", "${Version}", "chromium"])
    return versions(rustc=RUSTC) | ({"chromium": chromium} if chromium else {})


PART = Part("web", "the crate in a browser", 20, units, run, tools)
