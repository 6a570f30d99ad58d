"""Our operators against their definitions: the plain path, and the kernels in Triton's interpreter and on a GPU."""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from scalelong.kernels.attention import attention, fits
from scalelong.kernels.gelu import bias_gelu, linear_gelu
from scalelong.kernels.support import is_plain_linear

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernels run on a GPU")


def by_definition(qkv, heads):
    """softmax(q kᵀ/√d) v, written out, in float64."""
    q, k, v = qkv.double().unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def relative(a, b):
    return ((a.double() - b).norm() / b.norm()).item()


@pytest.mark.parametrize("tokens", [17, 65, 257, 258])
def test_attention_is_its_definition(tokens):
    qkv = torch.randn(2, tokens, 3 * 64, generator=torch.Generator().manual_seed(0))
    assert relative(attention(qkv, 2), by_definition(qkv, 2)) < 1e-5


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("large", [1, 3], ids=["scores of 1", "scores of 9"])
@pytest.mark.parametrize("tokens", [17, 257])
def test_attention_and_its_gradient_in_half_precision_on_a_cpu(tokens, large, autocast):
    """Rounded are what goes in and what comes out, and nothing between: bf16 scores of 9 would be off by 0.01."""
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(2, tokens, 3 * 64, generator=generator)
    qkv[..., : 2 * 64] *= large
    qkv = qkv.bfloat16()
    grad = torch.randn(2, tokens, 64, generator=generator).bfloat16()
    found, exact = qkv.clone().requires_grad_(), qkv.double().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = attention(found, 2)
    reference = by_definition(exact, 2)
    assert out.dtype == torch.bfloat16
    assert relative(out, reference) < 0.003
    out.backward(grad)
    reference.backward(grad.double())
    assert relative(found.grad, exact.grad) < 0.003


def test_which_shapes_the_kernel_takes():
    def takes(tokens, width, heads):
        return fits(torch.empty(1, tokens, 3 * width, device="meta"), heads)

    assert takes(257, 512, 8)  # U-ViT-S/2, and with a class token
    assert takes(258, 512, 8)
    assert not takes(256, 512, 8)
    assert not takes(334, 512, 8)  # 77 text tokens
    assert not takes(257, 1152, 16)  # heads of 72


def test_linear_gelu_is_the_two_layers_on_a_cpu():
    layer, x = nn.Linear(8, 256), torch.randn(3, 8)
    assert torch.equal(linear_gelu(x, layer), F.gelu(layer(x)))
    hidden, bias = torch.randn(5, 256), torch.randn(256)
    assert torch.equal(bias_gelu(hidden, bias), F.gelu(hidden + bias))


def test_a_layer_that_is_more_than_its_weights_is_called():
    layer = nn.Linear(4, 4)
    assert is_plain_linear(layer)
    assert not is_plain_linear(nn.Linear(4, 4, bias=False))
    assert not is_plain_linear(nn.Sequential(layer))
    handle = layer.register_full_backward_hook(lambda *args: None)
    assert not is_plain_linear(layer)
    handle.remove()
    layer.register_forward_hook(lambda *args: None)
    assert not is_plain_linear(layer)
    moved = nn.Linear(4, 4)
    moved.forward = lambda x: x  # as offloading and casting wrappers do
    assert not is_plain_linear(moved)


INTERPRETED = """
import torch
from scalelong.kernels.attention import _attend
from scalelong.kernels.gelu import _activate
from tests.kernels.test_kernels import by_definition, relative
import torch.nn.functional as F
torch.manual_seed(0)
for tokens, dim in ((65, 32), (66, 32), (129, 64), (258, 64)):
    qkv, grad = torch.randn(1, tokens, 3 * 2 * dim), torch.randn(1, tokens, 2 * dim)
    ours, want = qkv.clone().requires_grad_(), qkv.double().requires_grad_()
    out, reference = _attend(ours, 2)[0], by_definition(want, 2)
    out.backward(grad)
    reference.backward(grad.double())
    assert relative(out, reference) < 1e-5, tokens
    assert relative(ours.grad, want.grad) < 1e-5, tokens
hidden, bias, grad = 3 * torch.randn(137, 256), torch.randn(256), torch.randn(137, 256)
ours = [t.clone().requires_grad_() for t in (hidden, bias)]
want = [t.double().requires_grad_() for t in (hidden, bias)]
out, reference = _activate(*ours), F.gelu(want[0] + want[1])
out.backward(grad)
reference.backward(grad.double())
assert relative(out, reference) < 1e-6
assert all(relative(a.grad, b.grad) < 1e-6 for a, b in zip(ours, want))
print("agree")
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed here")
def test_the_kernels_in_tritons_interpreter():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    run = subprocess.run([sys.executable, "-c", INTERPRETED], capture_output=True, text=True, env=environment)
    assert run.stdout == "agree\n", run.stderr


COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from scalelong.kernels import attention, attention_triton, gelu_triton

def shared(kernel, tensors, sizes, num_warps=4):
    signature = {**tensors, **dict.fromkeys(sizes, "constexpr")}
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(tensors.values()) if kind[0] == "*"}
    source = ASTSource(kernel, signature=signature, constexprs=sizes, attrs=aligned)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps})
    assert made.asm["cubin"]
    return made.metadata.shared

def launched(kernel, tensors, launch, **sizes):
    launch = dict(launch)
    warps = launch.pop("num_warps")
    return shared(kernel, tensors, {**sizes, **launch}, warps)

half, wide = "*bf16", "*fp32"
both = {"qkv": half, "out": half, "grad": half, "lse": wide, "delta": wide, "dqkv": half}
both |= {"scale": "fp32", "scale_log2": "fp32"}
forward = ("qkv", "out", "lse", "scale_log2")
queries = tuple(both)
keys = tuple(name for name in both if name != "out")

gelu = {"hidden": half, "bias": wide, "grad": half, "d_hidden": half, "partial": wide, "rows": "i32"}
for half, head in (
    ("*bf16", {"H": 8, "D": 64, "EXTRA": 1, "MAIN": 256}),
    ("*fp16", {"H": 8, "D": 64, "EXTRA": 2, "MAIN": 256}),
    ("*bf16", {"H": 4, "D": 32, "EXTRA": 2, "MAIN": 64}),
):
    made = {name: half if kind == "*bf16" else kind for name, kind in both.items()}
    for kernel, names, launch in (
        (attention_triton.attention_forward, forward, attention.FORWARD),
        (attention_triton.attention_backward_queries, queries, attention.BACKWARD_QUERIES),
        (attention_triton.attention_backward_keys, keys, attention.BACKWARD_KEYS),
    ):
        print(launched(kernel, {name: made[name] for name in names}, launch, **head))
print(
    shared(gelu_triton.bias_gelu_backward, gelu, {"COLUMNS": 2048, "BC": 64, "BR": 64, "REPEAT": 2}),
)
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed here")
def test_the_kernels_compile_for_hopper_and_fit_it():
    """Triton brings NVIDIA's assembler: no GPU is needed to see what it refuses."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    run = subprocess.run([sys.executable, "-c", COMPILED], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    assert all(int(number) < 227 * 1024 for number in run.stdout.split())


@GPU
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [65, 257, 258])
def test_attention_on_a_gpu(tokens, dtype):
    torch.manual_seed(0)
    qkv = torch.randn(8, tokens, 3 * 512, device="cuda", dtype=dtype, requires_grad=True)
    grad = torch.randn(8, tokens, 512, device="cuda", dtype=dtype)
    want = qkv.detach().double().requires_grad_()
    out, reference = attention(qkv, 8), by_definition(want, 8)
    out.backward(grad)
    reference.backward(grad.double())
    assert relative(out, reference) < 1e-2
    assert relative(qkv.grad, want.grad) < 1e-2


@GPU
def test_gelu_on_a_gpu():
    torch.manual_seed(0)
    layer = nn.Linear(512, 2048).cuda()
    x = torch.randn(8, 257, 512, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        out = linear_gelu(x, layer)
    out.float().square().sum().backward()
    gradients = layer.weight.grad.clone(), layer.bias.grad.clone()
    layer.zero_grad()
    reference = F.gelu(layer.double()(x.double()))
    reference.square().sum().backward()
    assert relative(out, reference) < 1e-2
    for ours, p in zip(gradients, (layer.weight, layer.bias), strict=True):
        assert relative(ours, p.grad) < 1e-2
