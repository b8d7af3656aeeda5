#!/usr/bin/env bash
# The packages as crates.io would have them: makes both, checks that no page links to a file that is left out, unpacks them in a folder of
# their own, and runs the unit tests and the examples in the docs there, with and without CUDA. Needs nothing from crates.io of ours.
set -euo pipefail
cd "$(dirname "$0")/.."
target=$(cargo metadata --no-deps --format-version 1 | python3 -c 'import json, sys; print(json.load(sys.stdin)["target_directory"])')

# Links between pages, by file and by heading.
cargo package --list --allow-dirty -p wgpu-mla | python3 -c '
import os, re, sys
files = set(sys.stdin.read().split("\n"))
def anchors(page):
    heads = re.findall(r"^#+ (.*)$", open(page).read(), re.M)
    return {re.sub(r"[^\w\- ]", "", head.strip().lower()).replace(" ", "-") for head in heads}
bad = []
for page in sorted(file for file in files if file.endswith(".md")):
    for to, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", open(page).read()):
        if re.match(r"\w+:", to):
            continue
        file = os.path.normpath(os.path.join(os.path.dirname(page), to)) if to else page
        if file not in files:
            bad.append(f"{page} links to {file}, which is not in the package")
        elif anchor and anchor not in anchors(file):
            bad.append(f"{page} links to {file}#{anchor}, which has no such heading")
print("\n".join(bad) or "every link of a page leads into the package")
sys.exit(bool(bad))'

cargo package --no-verify --allow-dirty -p wgpu-mla-ptx -p wgpu-mla
there=$(mktemp -d)
trap 'rm -r "$there"' EXIT
for name in wgpu-mla wgpu-mla-ptx; do
    version=$(cargo pkgid -p "$name" | sed 's/.*[#@]//')
    mkdir "$there/$name"
    tar xzf "$target/package/$name-$version.crate" -C "$there/$name" --strip-components 1
done
cd "$there/wgpu-mla"
export CARGO_TARGET_DIR=$target
ptx=(--config "patch.crates-io.wgpu-mla-ptx.path='$there/wgpu-mla-ptx'")
cargo test "${ptx[@]}" --features cuda --lib
cargo test "${ptx[@]}" --features cuda --doc
cargo test "${ptx[@]}" --no-default-features --doc
