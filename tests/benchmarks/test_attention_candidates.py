"""Kernels that may take the place of those in use: right in Triton's interpreter, and accepted by its assembler."""

import importlib.util
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed here")

INTERPRETED = """
import torch
from benchmarks.attention_candidates import with_extras_in_tiles
from tests.kernels.test_kernels import by_definition, relative
torch.manual_seed(0)
for tokens, dim in ((65, 32), (66, 32), (129, 64), (258, 64)):
    qkv, grad = torch.randn(1, tokens, 3 * 2 * dim), torch.randn(1, tokens, 2 * dim)
    ours, want = qkv.clone().requires_grad_(), qkv.double().requires_grad_()
    out, reference = with_extras_in_tiles(ours, 2), by_definition(want, 2)
    out.backward(grad)
    reference.backward(grad.double())
    assert relative(out, reference) < 1e-5, tokens
    for part in (slice(0, 2), slice(2, None)):  # the extra tokens, and the others
        assert relative(out[:, part], reference[:, part]) < 1e-5, (tokens, part)
        for found, expected in zip(ours.grad[:, part].chunk(3, 2), want.grad[:, part].chunk(3, 2)):
            assert relative(found, expected) < 1e-5, (tokens, part)
print("agree")
"""

COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from benchmarks import attention_candidates as candidates
from scalelong.kernels import attention

half, wide = "*bf16", "*fp32"
kinds = {"qkv": half, "out": half, "grad": half, "lse": wide, "delta": wide, "dqkv": half, "sums": wide}
kinds |= {"query_sums": wide, "key_sums": wide, "scale": "fp32", "scale_log2": "fp32"}
parts = {"QUERY_PARTS": 4, "KEY_PARTS": 4, "num_warps": 1}
for extra in (1, 2):
    for kernel, launch in (
        (candidates.forward, attention.FORWARD),
        (candidates.backward_queries, attention.BACKWARD_QUERIES),
        (candidates.backward_keys, attention.BACKWARD_KEYS),
        (candidates.backward_extras, parts),
    ):
        sizes = {"H": 8, "D": 64, "EXTRA": extra, "MAIN": 256, **launch}
        warps = sizes.pop("num_warps")
        tensors = {name: kinds[name] for name in kernel.arg_names if name in kinds}
        signature = {**tensors, **dict.fromkeys(sizes, "constexpr")}
        aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(tensors.values()) if kind[0] == "*"}
        source = ASTSource(kernel, signature=signature, constexprs=sizes, attrs=aligned)
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
        assert made.asm["cubin"]
        print(made.metadata.shared)
"""


def output_of(code, **environment):
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_the_candidate_in_tritons_interpreter():
    assert output_of(INTERPRETED, TRITON_INTERPRET="1") == "agree\n"


@pytest.mark.slow
def test_the_candidate_compiles_for_hopper_and_fits_it():
    assert all(int(number) < 227 * 1024 for number in output_of(COMPILED).split())
