"""Who made what is not finite, among the calls of one step."""

import weakref

import pytest
import torch
from torch import nn

from scalelong.stability.pulse import Pulse
from scalelong.stability.replay import KEPT, StepCalls

BAD = float("nan")


class Root(nn.Module):
    def forward(self, x):
        return x.sqrt()


def net():
    """Positive weights: positive inputs have roots, negative ones have none."""
    model = nn.Sequential(nn.Linear(2, 2), Root(), nn.Linear(2, 1))
    for p in model.parameters():
        nn.init.constant_(p, 0.5)
    return model


def train(model, *inputs):
    for value in inputs:
        model(torch.full((1, 2), value)).sum().backward()


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ((BAD, 1.0), "in call 1 of the 2 in this step, the input of the model is not finite already"),
        ((-9.0, 1.0, 1.0), "in call 1 of the 3 in this step, the first module with a non-finite output is 1"),
        ((1.0, -9.0), "in call 2 of the 2 in this step, the first module with a non-finite output is 1"),
        ((-9.0,), "the first module with a non-finite output is 1"),
        ((-1.0, 1.0), "in call 1 of the 2 in this step, the first module with a non-finite gradient is 1"),
    ],
)
def test_the_piece_of_an_accumulated_batch_that_did_it(inputs, words):
    model = net()
    if inputs[0] == -1:
        nn.init.constant_(model[0].bias, 1.0)  # the root of 0 is finite, and its slope is not
    calls = StepCalls(model)
    train(model, *inputs)
    assert calls.trace("gradient") == words


def test_a_model_that_moved_after_it_was_watched_is_repeated_as_it_was_called():
    """Lightning moves it to its device, and there autocast makes what overflows."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)).to("meta")
    calls = StepCalls(model)
    model.to_empty(device="cpu")
    for p in model.parameters():
        nn.init.constant_(p, 300)
    with torch.autocast("cpu", torch.float16):
        loss = model(torch.full((1, 2), 300.0)).sum()
    assert not loss.isfinite()
    assert calls.trace("loss") == "the first module with a non-finite output is 0"


def test_a_mask_is_no_bad_input():
    model = net()

    def masked(x, mask):
        return nn.Sequential.forward(model, (x + mask.exp()).abs())

    model.forward = masked
    calls = StepCalls(model)
    nn.init.constant_(model[2].bias, BAD)
    model(torch.ones(1, 2), torch.tensor([0.0, -torch.inf])).sum().backward()
    assert calls.trace("loss").startswith("the first module with a non-finite output is 2, whose own bias")
    for bad in (BAD, torch.inf):
        calls.fresh = False
        model(torch.ones(1, 2), torch.tensor([0.0, bad])).sum().backward()
        assert calls.trace("loss") == "the input of the model is not finite already"


def test_only_the_calls_of_this_step_are_repeated():
    model = net()
    calls = StepCalls(model)
    train(model, -9.0)
    calls.fresh = False
    assert calls.trace("gradient").endswith("output is 1; seen on an earlier batch")
    model.zero_grad()
    train(model, 1.0, 1.0)
    assert (calls.count, len(calls.calls)) == (2, 2)
    assert calls.trace("gradient") == "it did not happen again when repeated"


def test_a_step_of_more_calls_than_are_kept_does_not_say_more_than_it_knows():
    model = net()
    calls = StepCalls(model)
    train(model, -9.0, *[1.0] * KEPT)
    assert calls.trace("gradient").startswith(
        "none of the last 8 calls of the model made it: one of the 9 in this step"
    )


def test_a_gradient_that_a_hook_spoils_is_named_by_its_parameter():
    model = net()
    calls = StepCalls(model)
    train(model, 1.0)
    model[0].bias.grad[1] = BAD
    assert calls.trace("gradient") == (
        "the first non-finite gradient is that of 0.bias, and finite when repeated: a hook, clipping or another "
        "loss made it"
    )
    model[0].bias.register_hook(lambda g: g * BAD)
    assert calls.trace("gradient") == "the first non-finite gradient is that of 0.bias"
    calls.close()
    assert calls.trace("gradient").endswith("; the first non-finite gradient is that of 0.bias")


def test_a_loss_that_is_not_finite_by_itself():
    model = net()
    calls = StepCalls(model)
    (model(torch.ones(1, 2)).sum() + float("inf")).backward()
    assert calls.trace("loss") == "every module's output is finite, so the target or the loss itself is not"


def test_an_input_that_was_refilled_since_is_said_to_be():
    model = net()
    calls = StepCalls(model)
    buffer = torch.full((1, 2), BAD)
    model(buffer).sum().square().backward()
    buffer.fill_(1.0)
    assert "its input was changed in place since the call" in calls.trace("loss")
    model.zero_grad()
    calls.fresh = False
    model(buffer).sum().square().backward()
    assert "changed" not in calls.trace("loss")
    with torch.inference_mode():
        unversioned = torch.ones(1, 2)
    with torch.no_grad():
        model(unversioned)  # not in training, and
    assert calls.count == 1
    model.requires_grad_(False)
    model(unversioned)
    assert calls.count == 2


def test_a_loss_that_the_loop_holds_does_not_hold_the_input():
    model = net()
    calls = StepCalls(model)
    x = torch.ones(1, 2)
    there = weakref.ref(x)
    held = model(x).sum()
    held.backward()
    calls.fresh = False
    del x
    train(model, 1.0)
    assert there() is None


def test_validation_is_not_counted_even_with_gradients():
    model = net()
    calls = StepCalls(model)
    train(model, 1.0)
    model.eval()
    train(model, 2.0)
    assert calls.count == 1
    model.train()
    train(model, 3.0)
    assert [call.arguments[0][0][0, 0] for call in calls.calls] == [1, 3]


def test_a_model_that_trains_in_eval_mode_is_counted_until_it_is_seen_in_the_other():
    model = net().eval()
    calls = StepCalls(model)
    train(model, 1.0)
    assert calls.count == 1
    model.train()
    train(model, 1.0)
    model.eval()
    train(model, 1.0)
    assert calls.count == 2


def test_what_is_repeated_is_not_counted():
    model = net()
    calls = StepCalls(model)
    pulse = Pulse(model, calls)
    train(model, 1.0)
    pulse.take(torch.tensor(1.0))
    calls.trace("gradient")
    assert not pulse._norms
    assert calls.count == 1
