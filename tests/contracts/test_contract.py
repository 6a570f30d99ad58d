"""Every scaling on every model, at every placement: what `apply` promises of all of them."""

import copy
import warnings

import pytest
import torch
from torch import nn

import scalelong
from scalelong.skips import AppliedScaling
from tests.contracts import reference
from tests.contracts.zoo import CASES, CONSTANT, EVERY_PLACE, EVERYTHING, LEARNED, ONE_OF_EACH_KIND, VARIANTS, Case

pytestmark = pytest.mark.filterwarnings("ignore:these weights look trained", "ignore:LS with ratio")


def name_of(value):
    return getattr(value, "name", value)


every_place = pytest.mark.parametrize(("case", "placement"), EVERY_PLACE, ids=name_of)
every_scaling_everywhere = pytest.mark.parametrize(
    ("case", "placement", "spec"),
    [
        pytest.param(c, p, s, marks=[pytest.mark.slow] if c.name in VARIANTS and s not in ONE_OF_EACH_KIND else [])
        for c, p, s in EVERYTHING
    ],
    ids=name_of,
)


def apply(case: Case, model: nn.Module, spec: str, placement: str, **more: bool) -> AppliedScaling:
    torch.manual_seed(3)
    return scalelong.apply(model, spec, placement=placement, **more)


def fingerprint(model: nn.Module) -> tuple:
    """Everything that `apply` could leave behind: tensors, modules, hooks, attributes, config."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_load_state_dict_post_hooks")
    return (
        {name: (t.data_ptr(), t._version, t.cpu().numpy().tobytes()) for name, t in model.state_dict().items()},
        [(name, type(m), sorted(m.__dict__)) for name, m in model.named_modules()],
        [len(getattr(m, hook)) for m in model.modules() for hook in hooks],
        {key: value for key, value in model.config.items() if not key.startswith("_")},
    )


def shake_gates(model: nn.Module) -> None:
    """Move what the scaling learns away from its start, where gates hardly depend on their input."""
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in scalelong.scaling_of(model).parameters():
            parameter.add_(
                torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter.dtype)
            )


@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.name)
def test_skips_are_found_outermost_first(case):
    skips = scalelong.find_skips(case.model())
    assert [skip.index for skip in skips] == list(range(len(case.merges)))
    assert tuple(skip.name for skip in skips) == case.merges
    assert tuple(skip.shape.channels for skip in skips) == case.widths
    assert {skip.shape.tokens for skip in skips} == {case.tokens}


@every_place
@pytest.mark.parametrize("spec", ["none", "cs:1", "uniform:1", "scalar"])
def test_scale_one_is_bitwise_identity(case, placement, spec):
    plain, model = case.model(), case.model()
    apply(case, model, spec, placement)
    with torch.no_grad():
        assert torch.equal(case.call(model), case.call(plain))


@every_scaling_everywhere
def test_agrees_with_an_independent_computation(case, placement, spec):
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        plain, model = case.model(dtype), case.model(dtype)
        apply(case, model, spec, placement)
        shake_gates(model)
        with torch.no_grad():
            got = case.call(model, dtype)
            want = reference.forward(case, plain, case.cast(dtype), spec, model.state_dict(), placement)
            unscaled = case.call(plain, dtype)
        assert got.dtype == want.dtype == dtype
        assert (got - want).norm() <= tolerance * want.norm()
        if spec != "none":
            assert (got - unscaled).norm() > 1e-4 * unscaled.norm()


@every_scaling_everywhere
def test_removal_restores_everything(case, placement, spec):
    model = case.model()
    before, output = fingerprint(model), case.call(model)
    handle = apply(case, model, spec, placement)
    assert scalelong.scaling_of(model) == handle
    handle.remove()
    assert fingerprint(model) == before
    assert torch.equal(case.call(model), output)
    assert scalelong.scaling_of(model) is None


@every_scaling_everywhere
def test_every_parameter_gets_a_gradient(case, placement, spec):
    plain, model = case.model(), case.model()
    apply(case, model, spec, placement)
    shake_gates(model)
    with torch.no_grad():  # the few hidden units of these small gates could all be on the dead side of a ReLU
        for name, parameter in model.named_parameters():
            parameter.add_(3 if name.endswith("layer1.bias") else 0)

    def without_gradient(m: nn.Module) -> set[str]:
        case.call(m).square().sum().backward()
        return {name for name, p in m.named_parameters() if p.grad is None or not p.grad.any()}

    assert without_gradient(model) == without_gradient(plain)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in scalelong.scaling_of(model).parameters())
    assert bool(scalelong.scaling_of(model).parameters()) == (spec in LEARNED)


@every_scaling_everywhere
def test_deepcopy_is_independent(case, placement, spec):
    model = case.model()
    apply(case, model, spec, placement)
    with torch.no_grad():
        before = case.call(model)
        twin = copy.deepcopy(model)
        assert torch.equal(case.call(twin), before)
        shake_gates(twin)
        assert torch.equal(case.call(model), before)
        if spec in LEARNED:
            assert not torch.equal(case.call(twin), before)
        scalelong.scaling_of(twin).remove()
        assert torch.equal(case.call(model), before)
        assert torch.equal(case.call(twin), case.call(case.model()))


@every_scaling_everywhere
def test_saved_and_loaded_agree_bitwise(case, placement, spec, tmp_path):
    model = case.model()
    handle = apply(case, model, spec, placement)
    shake_gates(model)
    model.save_pretrained(tmp_path)
    loaded = scalelong.load(tmp_path).eval()
    if case.name.endswith("freeu"):
        loaded.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4)
    assert loaded.state_dict().keys() == model.state_dict().keys()
    with torch.no_grad():
        assert torch.equal(case.call(loaded), case.call(model))
    if spec != "none":
        again = scalelong.scaling_of(loaded)
        assert (again.scaling, again.placement) == (handle.scaling, placement)


@every_scaling_everywhere
def test_second_application_is_refused_and_changes_nothing(case, placement, spec):
    model = case.model()
    apply(case, model, "cs:0.9", placement)
    before, output = fingerprint(model), case.call(model)
    with pytest.raises(ValueError, match=r"already has the scaling 'cs:0.9'.*remove"):
        apply(case, model, spec, placement)
    assert fingerprint(model) == before
    assert torch.equal(case.call(model), output)


@every_scaling_everywhere
def test_fold_agrees_or_refuses(case, placement, spec):
    model = case.model(torch.float64)
    handle = apply(case, model, spec, placement)
    shake_gates(model)
    before, scaled = fingerprint(model), case.call(model, torch.float64)
    exact = placement in case.folds_at and (spec in CONSTANT or spec.startswith("scalar"))
    if not exact and spec != "none":
        with pytest.raises(ValueError, match="folded|moved into the weights"):
            handle.fold()
        assert fingerprint(model) == before
        return
    handle.fold()
    assert scalelong.scaling_of(model) is None
    assert model.state_dict().keys() == case.model().state_dict().keys()
    assert "scalelong" not in model.config
    folded = case.call(model, torch.float64)
    # HunyuanDiT normalises in float32 whatever the model's precision.
    assert (folded - scaled).norm() <= (1e-6 if case.kind == "hunyuan" else 1e-12) * scaled.norm()


@every_scaling_everywhere
def test_keep_function_leaves_the_first_outputs(case, placement, spec):
    plain, model = case.model(torch.float64), case.model(torch.float64)
    before = fingerprint(model)
    if spec.startswith("skip-norm"):
        with pytest.raises(ValueError, match="divides each token by its own size"):
            apply(case, model, spec, placement, keep_function=True)
        assert fingerprint(model) == before
        return
    if placement not in case.folds_at and (spec in CONSTANT[1:] or spec.startswith("scalar")):
        with pytest.raises(ValueError, match="normalisation stands between"):
            apply(case, model, spec, placement, keep_function=True)
        assert fingerprint(model) == before
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "these weights look trained")
        handle = apply(case, model, spec, placement, keep_function=True)
    want = case.call(plain, torch.float64)
    tolerance = 1e-6 if case.kind == "hunyuan" else 1e-12
    assert (case.call(model, torch.float64) - want).norm() <= tolerance * want.norm()
    handle.remove()
    assert (case.call(model, torch.float64) - want).norm() <= tolerance * want.norm()


@every_place
@pytest.mark.parametrize("spec", ["cs:0.7", "ls", "scalar:0.6"])
def test_keep_function_survives_saving(case, placement, spec, tmp_path):
    if placement not in case.folds_at and spec != "ls":
        pytest.skip("refused at this placement")
    model = case.model()
    apply(case, model, spec, placement, keep_function=True)
    model.save_pretrained(tmp_path)
    loaded = scalelong.load(tmp_path).eval()
    if case.name.endswith("freeu"):
        loaded.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4)
    with torch.no_grad():
        assert torch.equal(case.call(loaded), case.call(model))
    assert scalelong.scaling_of(loaded).keep_function


@every_place
@pytest.mark.parametrize("spec", ["cs:0.7", "ls", "ls-per-skip"])
def test_gradient_checkpointing_gives_the_same_gradients(case, placement, spec):
    if not case.supports_checkpointing:
        pytest.skip("diffusers' model has none")
    gradients = []
    for checkpointing in (False, True):
        model = case.model(torch.float64).train()
        apply(case, model, spec, placement)
        if checkpointing:
            model.enable_gradient_checkpointing()
        case.call(model, torch.float64).square().sum().backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    for plain, checkpointed in zip(*gradients, strict=True):
        torch.testing.assert_close(checkpointed, plain, rtol=1e-9, atol=1e-12)


@every_place
@pytest.mark.parametrize("spec", ["cs:0.7", "ls", "ls-per-skip", "scalar:0.6"])
def test_coefficients_are_those_of_the_equations(case, placement, spec):
    model = case.model(torch.float64)
    handle = apply(case, model, spec, placement)
    shake_gates(model)
    got = handle.coefficients(**case.cast(torch.float64))
    assert len(got) == len(case.merges)
    if spec == "cs:0.7":
        torch.testing.assert_close(torch.stack(got), torch.tensor([0.7**i for i in range(len(got))]))
    elif spec == "scalar:0.6":
        want = [model.get_submodule(name).skip_scale.scale for name in case.merges]
        assert torch.equal(torch.stack(got), torch.cat(want))
    else:
        widths = [case.tokens] * len(got) if case.tokens else case.widths
        images = 6 if case.kind == "video" else 2  # each frame has coefficients of its own
        assert [tuple(c.shape) for c in got] == [(images, width) for width in widths]
        assert all(((c > 0) & (c < 1)).all() for c in got)
        assert not model.training
