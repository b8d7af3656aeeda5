"""The tree with Mesa from backports that scripts/vendors.sh makes."""

import os
import re
from pathlib import Path

from records import ROOT


def tools():
    """The version of its Mesa, or None without the tree."""
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    status = Path(os.environ.get("MESA_TREE", target / "mesa-tree")) / "var/lib/dpkg/status"
    found = status.exists() and re.search(r"^Package: mesa-vulkan-drivers\n(?:.+\n)*?Version: (\S+)", status.read_text(), re.M)
    return {"mesa": found[1]} if found else {}
