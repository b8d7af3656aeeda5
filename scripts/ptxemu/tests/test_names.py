"""The short names of registers in the committed PTX, and how the interpreter reads them."""

import re
import sys
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2] / "ptx"))

from compiler import short_registers
from test_faults import by_hand

HEAD = ".version 7.0\n"
ENTRY = """.visible .entry k(.param .u64 args0)
{
.reg .pred %p<2>;
.reg .b32 %r<9>;
.reg .b64 %rd<3>;
mov.u32 %r8,%tid.x;
shl.b32 %r7,%r8,2;
add.s32 %r7,%r7,%r8;
setp.lt.u32 %p1,%r8,4;
@%p1 bra $L1;
}
"""


def test_registers_are_a_letter_and_a_number_and_those_named_most_have_the_shortest():
    text = short_registers(HEAD + ENTRY + ENTRY.replace("%r8", "%r3").replace("$L1", "$L2"))
    head, one, other = text.split(".visible .entry ")
    assert head == HEAD
    assert ".reg .pred p<1>;\n.reg .b32 r<2>;\nmov" in one
    assert "mov.u32 r0,%tid.x;\nshl.b32 r1,r0,2;\nadd.s32 r1,r1,r0;\nsetp.lt.u32 p0,r0,4;\n@p0 bra $L1;" in one
    assert one == other.replace("$L2", "$L1")


def test_many_registers_have_more_letters_and_no_name_stands_for_two():
    for count in (9, 99, 640, 9000):
        body = "".join(f"mov.u32 %r{number},{number};\nmov.f32 %f{number},%f{number};\n" for number in range(count))
        text = short_registers(f".visible .entry k()\n{{\n.reg .f32 %f<{count}>;\n.reg .b32 %r<{count}>;\n{body}}}\n")
        declared = {
            f"{prefix}{number}": kind
            for kind, line in re.findall(r"^\.reg \.(\w+) (.*);$", text, re.M)
            for prefix, end in re.findall(r"(\w+)<(\d+)>", line)
            for number in range(int(end))
        }
        words = dict(re.findall(r"^mov\.u32 (\w+),(\d+);$", text, re.M))
        floats = re.findall(r"^mov\.f32 (\w+),\1;$", text, re.M)
        assert len(words) == len(set(floats)) == count and not words.keys() & set(floats)
        assert {declared[name] for name in words} == {"b32"} and {declared[name] for name in floats} == {"f32"}
        assert max(map(len, declared)) <= (3 if count < 2500 else 4)


def test_a_name_of_inline_asm_that_a_register_gets_is_refused():
    for name in ("r1", "p0", "d12", "Q7", "AB99"):
        try:
            short_registers(ENTRY.replace("mov.u32", f"{{.reg .b32 {name};}}\nmov.u32"))
        except RuntimeError as error:
            assert f"`{name}` in inline asm" in str(error)
        else:
            raise AssertionError(name)
    for name in ("state", "l", "r", "ex2.approx.f32", "0f00000000", "%clock64"):
        short_registers(ENTRY.replace("mov.u32", f"{name};\nmov.u32"))


def test_a_register_is_not_what_a_constant_ends_with():
    words = by_hand(
        "mov.u32 r0, %tid.x; cvt.rn.f32.u32 f0, r0; add.f32 f1, f0, 0f00000000; setp.eq.f32 p0, f1, 0f3F800000; cvt.rni.u32.f32 r1, f1;"
        "@p0 add.u32 r1, r1, 0xd1; shl.b32 r2, r0, 2; cvt.u64.u32 d1, r2; add.u64 d1, d1, %rd1; st.global.u32 [d1], r1;",
        ".reg .b32 r<3>; .reg .f32 f<2>; .reg .b64 d<2>; .reg .pred p<1>;",
    )
    want = np.arange(64)
    want[1] += 0xD1
    assert (words == want).all()
