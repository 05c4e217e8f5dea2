"""Kernels compile for real GPUs, which needs none: the interpreter accepts things that the compiler doesn't."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="triton isn't installed: pip install triton (Linux)")

CODE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from offramp.kernels import compact_kernels, gate_kernels

FLAGS = dict(live="*i8", leave="*i8")
COMMON = dict(
    row_stride="i32", rows="i32", uniform="fp32", threshold="fp32", label="*i32",
    confidence="*fp64", score="*fp32", entropy="*fp64", margin="*fp64", survivors="*i32", count="*i32", tickets="*i32",
    parts_f="*fp32", parts_i="*i32", scale="*fp32", bias="*fp32", inv_temperature="*fp32", column_stride="i32",
    counts="*i32", blocks="i32", index="*i32", picked="i32", sources=("*i64", "*i16"), targets=("*i64", "*i16"),
    starts=("i32",) * 3, sizes=(("i32",) * 4,) * 2, **FLAGS,
)

def compiled(kernel, capability, warps=4, logits="*fp32", **constants):
    kinds = {**COMMON, "logits": logits}
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else kinds[n] for n in names}
    aligned = {(k,): [["tt.divisibility", 16]] for k, n in enumerate(names) if str(signature[n])[0] == "*"}
    fixed = {(names.index(n),): value for n, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=fixed, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps}).asm["ptx"]

plain = dict(scale=None, bias=None, inv_temperature=None, column_stride=1)
for capability in CAPABILITIES:
    for logits in ("*fp32", "*fp16", "*bf16"):
        ptx = compiled(gate_kernels.gate_tile, capability, logits=logits, classes=1000, ALIGNED=8, ROWS=2, BLOCK=1024,
                       COMPACT=2, **plain)
        assert "ld.global.v4.b32" in ptx, "16 bytes a load, though 1,000 isn't a multiple of 16"
        ptx = compiled(gate_kernels.gate_stream, capability, 8, logits, classes=128256, ALIGNED=16, STEPS=8, PARTS=8,
                       BLOCK=2048, COMPACT=1, **plain)
        assert "ld.global.v4.b32" in ptx
    compiled(gate_kernels.gate_tile, capability, classes=10, ALIGNED=2, ROWS=8, BLOCK=16, COMPACT=0)
    compiled(gate_kernels.gate_tile, capability, classes=1, ALIGNED=1, ROWS=8, BLOCK=16, COMPACT=0)
    compiled(gate_kernels.gate_stream, capability, 8, classes=20000, ALIGNED=1, STEPS=10, PARTS=1, BLOCK=2048,
             COMPACT=1)
    compiled(compact_kernels.compact_rows, capability, STEPS=2, BLOCK=1024)
    compiled(compact_kernels.count_blocks, capability, BLOCK=1024)
    compiled(compact_kernels.place_blocks, capability, STEPS=1, BLOCK=1024)
    compiled(compact_kernels.gather_tensors, capability, SHAPES=((1, 2048), (64, 32)))
print("compiled")
"""


def test_every_kernel_compiles_for_ampere_and_hopper_with_wide_loads(tmp_path):
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    script = tmp_path / "compile.py"  # a file: the compiler reads its functions' source
    script.write_text(CODE.replace("CAPABILITIES", "(80, 90)"))
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "compiled"
