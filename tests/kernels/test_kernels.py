"""Our operators against their definitions: the plain path, and the kernels in Triton's interpreter and on a GPU."""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from scalelong.kernels import gelu
from scalelong.kernels.attention import _kernels_serve, attention, shape_of
from scalelong.kernels.attention import by_definition as attention_by_hand
from scalelong.kernels.gelu import bias_gelu, linear_gelu
from scalelong.kernels.support import is_plain

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernels run on a GPU")


def by_definition(qkv, heads):
    """softmax(q kᵀ/√d) v, written out, in float64."""
    q, k, v = qkv.double().unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def targets_of_compiled_attention(qkv):
    """The operators, other than views, that a compiler is given for it."""
    seen = set()

    def backend(graph, _):
        seen.update(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    torch.compile(lambda x: attention(x, 8), backend=backend, fullgraph=True)(qkv)
    return {target for target in seen if "getitem" not in target}


def relative(a, b):
    return ((a.double() - b).norm() / b.norm()).item()


def parts(tokens):
    """The extra tokens, and the others: each wrong by themselves, they would hardly show in all."""
    return (slice(tokens % 64), slice(tokens % 64, None))


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
        return shape_of(torch.empty(1, tokens, 3 * width, device="meta"), heads)

    assert takes(257, 512, 8) == (257, 64)  # U-ViT-S/2, and with a class token
    assert takes(258, 512, 8) == (258, 64)
    assert takes(65, 64, 2) == (65, 32)
    assert not takes(256, 512, 8)
    assert not takes(334, 512, 8)  # 77 text tokens
    assert not takes(257, 1152, 16)  # heads of 72
    assert not shape_of(torch.empty(1, 65, 294, device="meta"), 3)  # not three parts of whole heads


def test_linear_gelu_is_the_two_layers_on_a_cpu():
    layer, x = nn.Linear(8, 256), torch.randn(3, 8)
    assert torch.equal(linear_gelu(x, layer), F.gelu(layer(x)))
    hidden, bias = torch.randn(5, 256), torch.randn(256)
    assert torch.equal(bias_gelu(hidden, bias), F.gelu(hidden + bias))


def test_a_layer_that_is_more_than_its_weights_is_called():
    layer = nn.Linear(4, 4)
    assert is_plain(layer, nn.Linear)
    assert not is_plain(nn.Linear(4, 4, bias=False), nn.Linear)
    assert not is_plain(nn.Sequential(layer), nn.Linear)
    handle = layer.register_full_backward_hook(lambda *args: None)
    assert not is_plain(layer, nn.Linear)
    handle.remove()
    layer.register_forward_hook(lambda *args: None)
    assert not is_plain(layer, nn.Linear)
    moved = nn.Linear(4, 4)
    moved.forward = lambda x: x  # as offloading and casting wrappers do
    assert not is_plain(moved, nn.Linear)


INTERPRETED = """
import torch
from scalelong.kernels.attention_op import attend
from scalelong.kernels.gelu import _activate
from tests.kernels.test_kernels import by_definition, parts, relative
import torch.nn.functional as F
torch.manual_seed(0)
for tokens, dim in ((65, 32), (66, 32), (129, 64), (258, 64)):
    qkv, grad = torch.randn(1, tokens, 3 * 2 * dim), torch.randn(1, tokens, 2 * dim)
    ours, want = qkv.clone().requires_grad_(), qkv.double().requires_grad_()
    out, reference = attend(ours, 2)[0], by_definition(want, 2)
    out.backward(grad)
    reference.backward(grad.double())
    for found, expected in ((out, reference), *zip(ours.grad.chunk(3, 2), want.grad.chunk(3, 2))):
        for part in parts(tokens):
            assert relative(found[:, part], expected[:, part]) < 1e-5, (tokens, part)
hidden, bias, grad = 3 * torch.randn(8201, 256), torch.randn(256), torch.randn(8201, 256)  # a column of 65 sums
ours = [t.clone().requires_grad_() for t in (hidden, bias)]
want = [t.double().requires_grad_() for t in (hidden, bias)]
out, reference = _activate(*ours), F.gelu(want[0] + want[1])
out.backward(grad)
reference.backward(grad.double())
assert relative(out, reference) < 5e-6
assert all(relative(a.grad, b.grad) < 5e-6 for a, b in zip(ours, want))
print("agree")
"""

MISTAKEN = """
import warnings
import torch
from scalelong.kernels import attention as ours, checking
from tests.kernels.test_kernels import by_definition, relative, targets_of_compiled_attention

ours.kernels_run_on, ours.has_large_shared_memory = lambda tensor: True, lambda device: True
ours._REPEAT = 1
asked, attend, right = [], ours.attend, ours.attend_backward
ours.attend = lambda *given: asked.append(given[0].shape[1]) or attend(*given)

def near(attention, tokens):
    qkv = torch.randn(1, tokens, 3 * 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    want = qkv.detach().double().requires_grad_()
    out, reference = attention(qkv, 2), by_definition(want, 2)
    out.sum().backward()
    reference.sum().backward()
    return relative(out, reference) < 1e-5 and relative(qkv.grad, want.grad) < 1e-5

warnings.simplefilter("error")
state = torch.get_rng_state()
assert near(ours.attention, 65)
assert near(torch.compile(ours.attention, backend="eager", fullgraph=True), 66)
assert asked == [65, 65, 66, 66], asked  # a check, a call
assert near(ours.attention, 65)
assert asked == [65, 65, 66, 66, 65], asked  # asked once
assert torch.equal(torch.get_rng_state(), state)
assert targets_of_compiled_attention(torch.randn(1, 65, 3 * 8 * 32)) == {"scalelong.attention.default"}
del asked[5:]
heads = torch.compile(ours.attention, backend="eager", fullgraph=True, dynamic=True)
assert near(heads, 65)  # with a number of heads that the compiler takes for one that may change
del asked[5:]
with torch.no_grad():  # what is right on the way back is right
    ours.attention(torch.randn(1, 65, 192), 2)
assert asked[5:] == [65], asked
changing = torch.compile(lambda qkv, _: ours.attention(qkv, 2), backend="eager", fullgraph=True, dynamic=True)
assert near(changing, 65) and near(changing, 129) and near(changing, 70)
assert asked[6:] == [65, 129, 129], asked

def a_row(found):
    found[1, 7, 32:64] = 0  # of one image, token and head

def a_token(found):
    found[:, 0, 64:] *= 1.1

for tokens, spoil, size in ((129, a_row, "1 on"), (130, a_token, "0.1 on"), (66, a_token, "0.1 on")):
    def fails(*given):
        found = right(*given)
        if len(found) > 1:  # the check's own
            spoil(found)
        return found

    ours.attend_backward = fails
    checking._verdicts.clear()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert near(ours.attention, tokens)
    said = f"kernels for attention are off by {size} cpu ({tokens} tokens, 2 heads of 32"
    assert said in str(told[0].message), told[0].message
    assert "torch's run in their place" in str(told[0].message)
with torch.no_grad():  # the way back is not asked about where nobody goes it
    assert ours._kernels_serve(torch.empty(1, 65, 192), 2)

def refuses(*given):
    raise RuntimeError("out of resources: shared memory\\nof 227 KiB")

def is_full(*given):
    raise torch.OutOfMemoryError("CUDA out of memory")

ours.attend_backward = is_full
checking._verdicts.clear()
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    for attention in (ours.attention, torch.compile(ours.attention, backend="eager", fullgraph=True)):
        assert near(attention, 65)
assert ["no memory left" in str(w.message) for w in told] == [True, True] and not checking._verdicts

for fails, reason in (
    (lambda *given: right(*given) * float("nan"), "kernels for attention are off by nan on"),
    (refuses, "kernels for attention cannot be run (RuntimeError: out of resources: shared memory) on"),
):
    ours.attend_backward = fails
    checking._verdicts.clear()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert not ours._kernels_serve(torch.empty(1, 65, 192), 2)
    assert reason in str(told[0].message), told[0].message
print("told")
"""

ELSEWHERE = """
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from scalelong.kernels import attention as ours, gelu, support
from tests.kernels.test_kernels import by_definition, relative

runs, attend = [], ours.attend
ours.attend = lambda *given: runs.append(1) or attend(*given)
ours.has_large_shared_memory = lambda device: True
ours._REPEAT = 1
ours.kernels_run_on = gelu.kernels_run_on = lambda tensor: support._first_derivatives_suffice()
qkv, v = torch.randn(1, 65, 192).double(), torch.randn(1, 65, 192).double()
exact = torch.func.jvp(lambda x: by_definition(x, 2), (qkv,), (v,))[1]
hidden, bias, ones = torch.randn(4, 256), torch.randn(256), torch.ones(4, 256)
slope = torch.func.jvp(lambda x: torch.nn.functional.gelu(x + bias), (hidden.double(),), (ones.double(),))[1]
qkv, v = qkv.float(), v.float()
ours.attention(qkv, 2)
assert len(runs) == 2  # the check, and the call
with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]):  # flash is on, and math has what it lacks
    assert support.torch.backends.cuda.flash_sdp_enabled()
    try:
        wrong = relative(torch.func.jvp(lambda x: ours.attention(x, 2), (qkv,), (v,))[1], exact)
    except NotImplementedError:  # torch's own word: nothing is wrong in silence
        wrong = 0
    assert wrong < 1e-5
with sdpa_kernel(SDPBackend.MATH):
    assert relative(torch.func.jvp(lambda x: ours.attention(x, 2), (qkv,), (v,))[1], exact) < 1e-5
assert relative(torch.func.jvp(lambda x: gelu.bias_gelu(x, bias), (hidden,), (ones,))[1], slope) < 1e-5
assert torch.func.vmap(lambda x: ours.attention(x[None], 2)[0])(qkv.expand(3, -1, -1)).shape == (3, 65, 64)
assert torch.func.grad(lambda x: ours.attention(x, 2).sum())(qkv).isfinite().all()
with torch.autograd.forward_ad.dual_level(), sdpa_kernel(SDPBackend.MATH):
    dual = torch.autograd.forward_ad.make_dual(qkv, v)
    assert relative(torch.autograd.forward_ad.unpack_dual(ours.attention(dual, 2)).tangent, exact) < 1e-5
with sdpa_kernel(SDPBackend.MATH):  # as who wants second derivatives asks for it
    x = qkv.clone().requires_grad_()
    (first,) = torch.autograd.grad(ours.attention(x, 2).square().sum(), x, create_graph=True)
    assert torch.autograd.grad(first.square().sum(), x)[0].isfinite().all()
assert len(runs) == 2
ours.attention(qkv, 2)
assert len(runs) == 3
# What torch refuses is refused, and a bias need not lie in one piece.
wide = torch.randn(512)
exact = torch.nn.functional.gelu(hidden.double() + wide[::2].double())
assert relative(gelu.bias_gelu(hidden, wide[::2]), exact) < 1e-5
try:
    ours.attention(torch.randn(1, 65, 294), 3)
except RuntimeError:
    print("refused")
"""

OPERATORS = """
import torch
from torch.library import opcheck
from scalelong.kernels import attention_op, gelu

torch.manual_seed(0)
packed = torch.randn(1, 192, 65).transpose(1, 2)
out, lse = attention_op.attend(packed, 2)
checks = "test_schema", "test_faketensor"
for qkv in (packed, packed.contiguous()):
    opcheck(attention_op.attend, (qkv, 2), test_utils=checks)
    opcheck(attention_op.attend_backward, (qkv, out, lse, torch.randn(1, 65, 64), 2), test_utils=checks)
across = torch.randn(256, 4).T
opcheck(gelu._activate, (across, torch.randn(256)), test_utils=checks)
opcheck(gelu._activate_backward, (across, torch.randn(256), torch.randn(4, 256)), test_utils=checks)
print("so")
"""


def interpreted(code):
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    return run.stdout or run.stderr


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed here")
def test_the_kernels_in_tritons_interpreter():
    assert interpreted(INTERPRETED) == "agree\n"


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed here")
def test_kernels_that_a_compiler_got_wrong_are_told_and_not_used():
    assert interpreted(MISTAKEN) == "told\n"


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed here")
def test_what_the_kernels_cannot_do_is_left_to_torch():
    assert interpreted(ELSEWHERE) == "refused\n"


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed here")
def test_what_a_compiler_is_told_of_the_operators_is_so():
    """Shapes and strides, by torch's own check, of inputs that are not in one piece too."""
    assert interpreted(OPERATORS) == "so\n"


@pytest.mark.parametrize("tokens", [65, 258])
def test_the_definition_that_kernels_are_compared_with(tokens):
    generator = torch.Generator().manual_seed(0)
    qkv, grad = (torch.randn(2, tokens, width, generator=generator, dtype=torch.float64) for width in (192, 64))
    qkv.requires_grad_()
    reference = by_definition(qkv, 2)
    reference.backward(grad)
    found = attention_by_hand(qkv.detach(), grad, 2)
    for ours, want in zip(found, (reference, *qkv.grad.chunk(3, 2)), strict=True):
        assert relative(ours, want) < 1e-12


COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from scalelong.kernels import attention_op, attention_triton, gelu, gelu_triton

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
both |= {"scale": "fp32", "scale_log2": "fp32", "sums": wide, "query_sums": wide, "key_sums": wide}
extras = {"QUERY_PARTS": 4, "KEY_PARTS": 4, "num_warps": 1}

activation = {"hidden": half, "bias": wide, "grad": half, "d_hidden": half, "partial": wide, "rows": "i32"}
for half, head in (
    ("*bf16", {"H": 8, "D": 64, "EXTRA": 1, "MAIN": 256}),
    ("*fp16", {"H": 8, "D": 64, "EXTRA": 2, "MAIN": 256}),
    ("*bf16", {"H": 4, "D": 32, "EXTRA": 2, "MAIN": 64}),
):
    made = {name: half if kind == "*bf16" else kind for name, kind in both.items()}
    for kernel, launch in (
        (attention_triton.attention_forward, attention_op.FORWARD),
        (attention_triton.attention_backward_queries, attention_op.BACKWARD_QUERIES),
        (attention_triton.attention_backward_keys, attention_op.BACKWARD_KEYS),
        (attention_triton.attention_backward_extras, extras),
    ):
        print(launched(kernel, {name: made[name] for name in kernel.arg_names if name in made}, launch, **head))
print(launched(gelu_triton.bias_gelu_backward, activation, gelu.BACKWARD, COLUMNS=2048))
print(launched(gelu_triton.column_sums, {"partial": wide, "out": wide, "rows": "i32"}, gelu.SUMS, COLUMNS=2048))
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
    assert _kernels_serve(qkv.detach(), 8)
    out, reference = attention(qkv, 8), by_definition(want, 8)
    out.backward(grad)
    reference.backward(grad.double())
    for found, expected in ((out, reference), *zip(qkv.grad.chunk(3, 2), want.grad.chunk(3, 2), strict=True)):
        for part in parts(tokens):
            assert relative(found[:, part], expected[:, part]) < 1e-2


@GPU
def test_a_compiled_model_runs_them():
    assert targets_of_compiled_attention(torch.randn(2, 257, 1536, device="cuda", dtype=torch.bfloat16)) == {
        "scalelong.attention.default"
    }


@GPU
def test_gelu_on_a_gpu():
    torch.manual_seed(0)
    layer = nn.Linear(512, 2048).cuda()
    x = torch.randn(8, 257, 512, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        out = linear_gelu(x, layer)
        assert gelu._kernels_serve(out.detach(), layer.bias)
    out.float().square().sum().backward()
    gradients = layer.weight.grad.clone(), layer.bias.grad.clone()
    layer.zero_grad()
    reference = F.gelu(layer.double()(x.double()))
    reference.square().sum().backward()
    assert relative(out, reference) < 1e-2
    for ours, p in zip(gradients, (layer.weight, layer.bias), strict=True):
        assert relative(ours, p.grad) < 1e-2
