#!/usr/bin/env python3
"""Copies a case file with one element of `out` off by 1, so that a run of it must fail: wrong_case.py FROM TO."""

import json
import struct
import sys
from pathlib import Path


def main(source, to):
    data = bytearray(Path(source).read_bytes())
    length = struct.unpack_from("<Q", data)[0]
    out = json.loads(data[8 : 8 + length])["out"]
    assert out["dtype"] == "F32"
    at = 8 + length + out["data_offsets"][0]
    struct.pack_into("<f", data, at, struct.unpack_from("<f", data, at)[0] + 1)
    Path(to).write_bytes(data)


if __name__ == "__main__":
    main(*sys.argv[1:])
