"""Counted memory against what torch's allocator and autograd do with real tensors."""

from functools import partial

import pytest
import torch
from torch import nn

from scalelong.backbones.build import build
from scalelong.backbones.memory import LiveBytes, step_bytes

UVIT = partial(build, "cifar10-uvit-xs", hidden_size=64, num_layers=2, num_attention_heads=2, scaling="ls")
UNET = partial(
    build,
    "cifar10-unet",
    block_out_channels=(32, 32, 32, 32),
    attention_head_dim=32,
    layers_per_block=1,
    sample_size=16,
    dropout=0.0,
)


def checkpointed(make):
    model = make()
    model.enable_gradient_checkpointing()
    return model


def inputs(size, batch=8):
    return (torch.zeros(batch, 3, size, size), torch.zeros(batch)), {}


def step(model, arguments):
    prediction = model(*arguments, return_dict=False)[0]
    loss = prediction.square().mean()
    del prediction
    loss.backward()


def allocated_at_most(model, arguments):
    """The fullest moment of a real step, in the words of the allocator."""
    step(model, arguments)  # what is allocated once is there
    model.zero_grad(set_to_none=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step(model, arguments)
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


@pytest.mark.parametrize(
    ("make", "size"), [(UVIT, 32), pytest.param(UNET, 16, marks=pytest.mark.slow)], ids=["uvit", "unet"]
)
@pytest.mark.parametrize("how", [lambda make: make(), checkpointed], ids=["plain", "checkpointed"])
def test_the_peak_is_the_allocators(make, size, how):
    counted = step_bytes(partial(how, make), partial(inputs, size)).peak
    measured = allocated_at_most(how(make).train(), inputs(size)[0])
    assert counted == pytest.approx(measured, rel=0.05 if size == 32 else 0.1)  # convolutions borrow some


def test_what_is_kept_is_what_autograd_saves():
    model, saved = UVIT().train(), {}
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    arguments = inputs(32)[0]
    weights |= {t.untyped_storage().data_ptr() for t in arguments}
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        prediction = model(*arguments, return_dict=False)[0]
    kept = step_bytes(UVIT, partial(inputs, 32)).kept
    assert kept == pytest.approx(sum(saved.values()), rel=0.05)
    assert prediction.requires_grad


def test_memory_grows_with_the_batch_and_shrinks_with_checkpoints_and_precision():
    def peak(make, batch, precision="fp32"):
        return step_bytes(make, partial(inputs, 32, batch), precision).peak

    plain = peak(UVIT, 32)
    assert peak(UVIT, 64) == pytest.approx(2 * plain, rel=0.1)
    assert peak(partial(checkpointed, UVIT), 32) < 0.8 * plain
    assert 0.4 * plain < peak(UVIT, 32, "bf16") < 0.8 * plain


def test_storages_are_counted_once_and_let_go():
    with LiveBytes() as live:
        a = torch.zeros(100)
        b = a.view(10, 10)
        assert live.now == 400
        c = b + 1
        assert live.now == 800
        c += 1
        del a
        assert live.now == 800
        del b
        assert live.now == 400
        nn.functional.relu(c)
        assert (live.now, live.peak) == (400, 800)
