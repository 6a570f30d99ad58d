import math

import pytest
import torch

import scalelong
from scalelong.training.signals import Observer, Oscillation, gradient_norms, oscillation_index
from tests.contracts.zoo import CASES, EVERY_PLACE


def test_the_index_of_known_signals():
    assert oscillation_index([3.0] * 10) == 0
    assert oscillation_index([1.0, -1.0] * 10) == 2
    values = torch.randn(100_000, generator=torch.Generator().manual_seed(0)).tolist()
    assert abs(oscillation_index(values) - math.sqrt(2)) < 0.01
    assert oscillation_index([0.0, 0.0, 0.0]) == 0


def test_only_the_last_values_count_and_a_checkpoint_keeps_them():
    first = Oscillation()
    for i in range(30):
        first.update({"x": float(i % 7)})
    second = Oscillation()
    second.load(first.state())
    assert first.update({"x": 2.0}) == second.update({"x": 2.0})
    assert len(first.history["x"]) == 20


@pytest.mark.parametrize(("case", "placement"), EVERY_PLACE, ids=lambda v: getattr(v, "name", v))
@pytest.mark.filterwarnings("ignore:these weights look trained")
def test_norms_at_the_merges_are_those_of_the_tensors_that_meet(case, placement):
    model = case.model()
    scalelong.apply(model, "uniform:0.5", placement=placement)
    observer = Observer(model)
    with observer.watching():
        case.call(model).square().mean().backward()
    observer.measure()
    signals = observer.signals()
    n = len(case.merges)
    assert all(signals[f"coefficient/{i}"] == 0.5 for i in range(n))
    for i in range(n):
        ratio = signals[f"skip norm/{i}"] / signals[f"main norm/{i}"]
        assert math.isclose(signals[f"skip to main/{i}"], ratio, rel_tol=1e-5)
    assert not any(m._forward_pre_hooks and "see" in str(m._forward_pre_hooks) for m in model.modules())


def test_the_outermost_skip_of_a_uvit_is_the_first_blocks_output():
    case = CASES["uvit"]
    model = case.model()
    seen = {}
    model.in_blocks[0].register_forward_hook(lambda m, a, out: seen.update(first=out))
    model.out_blocks[1].register_forward_hook(lambda m, a, out: seen.update(before_last=out))
    observer = Observer(model)
    with observer.watching():
        case.call(model).sum().backward()
    observer.measure()
    signals = observer.signals()
    assert math.isclose(signals["skip norm/0"], seen["first"].norm().item(), rel_tol=1e-5)
    assert math.isclose(signals["main norm/0"], seen["before_last"].norm().item(), rel_tol=1e-5)


def test_a_merge_that_was_not_seen_and_one_without_gradients_are_left_out():
    case = CASES["uvit"]
    model = case.model()
    model.out_blocks[1].requires_grad_(False)
    observer = Observer(model)
    case.call(model).sum().backward()
    observer.measure(blocks=False)
    assert set(observer.signals()) == {"merge gradient/0", "merge gradient/2"}
    with observer.watching():
        model.out_blocks[2]._forward_pre_hooks.clear()
        case.call(model).sum().backward()
    observer.measure(blocks=False)
    assert {f"skip to main/{i}" for i in range(3)} & set(observer.signals()) == {"skip to main/1", "skip to main/2"}
    model.zero_grad()
    observer.measure(blocks=False)
    assert observer.signals() == {}


def test_block_gradients_add_up_to_the_whole():
    case = CASES["uvit"]
    model = case.model()
    case.call(model).square().sum().backward()
    norms = gradient_norms(model)
    total = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    assert math.isclose(math.sqrt(sum(n.item() ** 2 for n in norms.values())), total.item(), rel_tol=1e-5)
    assert {"in_blocks.0", "mid_block", "out_blocks.2", "decoder_pred"} <= set(norms)


def test_gates_are_averaged():
    case = CASES["uvit"]
    model = case.model()
    with pytest.warns(UserWarning, match="look trained"):
        handle = scalelong.apply(model, "ls-per-skip")
    observer = Observer(model)
    with observer.watching():
        case.call(model).sum().backward()
    want = [c.mean().item() for c in handle.coefficients(**case.inputs)]
    observer.measure()
    signals = observer.signals()
    for i, mean in enumerate(want):
        assert math.isclose(signals[f"coefficient/{i}"], mean, rel_tol=1e-5)
