"""What `apply` returns: a handle on the scaling that sits in a model. It holds nothing but the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from scalelong.skips import fold, summary
from scalelong.skips.attach import SkipScaling, adapter_for, attached, detach, is_gate_key, refuse_offloaded
from scalelong.skips.scalers import LearnedScale, SkipScale, first_coefficients
from scalelong.skips.sites import LongSkip
from scalelong.skips.spec import Scaling


@dataclass(frozen=True)
class AppliedScaling:
    """The scaling of a model's long skips. In a `with` block it is removed at the end."""

    model: nn.Module

    @property
    def scaling(self) -> Scaling:
        """What was applied."""
        return self._root.scaling

    @property
    def placement(self) -> str:
        """Where the skip is multiplied: "concat" or "norm"."""
        return self._root.placement

    @property
    def keep_function(self) -> bool:
        """Whether the weights, or the gates' start, were chosen so that the outputs did not change."""
        return self._root.keep_function

    @property
    def skips(self) -> list[LongSkip]:
        """The long skips, outermost first."""
        self._root  # noqa: B018 - a handle whose scaling was removed says so
        return adapter_for(self.model).find(self.model)

    @property
    def scales(self) -> list[SkipScale]:
        """The modules that give the coefficients, outermost first."""
        return [skip.block.skip_scale for skip in self.skips]

    def parameters(self) -> list[nn.Parameter]:
        """All that the scaling itself learns: for an optimiser group of its own."""
        modules = nn.ModuleList([*self.scales, self._root])
        return list(modules.parameters())

    def state_dict(self) -> dict[str, Tensor]:
        """All that the scaling has learned, by its names in the model: to be saved beside LoRA's own weights."""
        return {name: tensor for name, tensor in self.model.state_dict().items() if is_gate_key(name)}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Put back what `state_dict` gave, all of it or nothing."""
        own = self.state_dict()
        shapes, given = ({name: tensor.shape for name, tensor in s.items()} for s in (own, state))
        if wrong := sorted({name for name, _ in shapes.items() ^ given.items()}):
            raise ValueError(
                f"the state of {str(self.scaling)!r} on this model has {len(own)} tensors, and what was given "
                f"differs in {', '.join(wrong)}; apply the scaling that the state was saved from."
            )
        for name, tensor in own.items():
            tensor.copy_(state[name])

    def coefficients(self, *inputs: Any, **named_inputs: Any) -> list[Tensor]:
        """One tensor per skip, outermost first: a 0-d one for a number, [B, width] for a gate.

        Gates read their skips, so the model runs once on the inputs, in eval mode and without gradient.
        """
        scales = self.scales
        if not any(scale.reads_skip for scale in scales):
            return [
                scale.scale.detach().clone().squeeze()
                if isinstance(scale, LearnedScale)
                else torch.tensor(scale.number())
                for scale in scales
            ]
        if not inputs and not named_inputs:
            raise ValueError("these coefficients depend on the input: give the model's inputs to coefficients().")
        found = summary.capture_coefficients(self.model, scales, inputs, named_inputs)
        return [coefficient.flatten(1) for coefficient in found]

    def summary(self, *inputs: Any, **named_inputs: Any) -> str:
        """One row per long skip: index, module, shape, coefficient.

        Where a normalisation follows the concatenation, also the share of skip channels in groups that
        hold nothing else, on which a constant is undone; with the model's inputs, the measured share too.
        """
        return summary.summarise(self, inputs, named_inputs)

    def remove(self) -> None:
        """Take the scaling off, and undo what `keep_function` did to the weights. A second time does nothing."""
        if attached(self.model) is None:
            return
        if self.keep_function:
            refuse_offloaded(self.model, "remove()")
            first = first_coefficients(self.scaling, len(self.skips)) or ()
            fold.scale_merge_weights(adapter_for(self.model), self.skips, self.placement, first)
        detach(self.model)

    def fold(self) -> nn.Module:
        """Write the constants into the weights and leave a plain model with the same outputs.

        Exact on U-ViT, and at placement="norm" on GroupNorm UNets and HunyuanDiT; refused elsewhere.
        """
        refuse_offloaded(self.model, "fold()")
        adapter, skips, constants = adapter_for(self.model), self.skips, fold.constants_of(self.scales)
        fold.check_exact(adapter, skips, self.placement, constants)
        fold.scale_merge_weights(adapter, skips, self.placement, constants)
        detach(self.model)
        return self.model

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        root = attached(self.model)
        what = "removed" if root is None else f"{str(root.scaling)!r}, placement={root.placement!r}"
        return f"AppliedScaling({type(self.model).__name__}, {what})"

    @property
    def _root(self) -> SkipScaling:
        root = attached(self.model)
        if root is None:
            raise ValueError(f"{type(self.model).__name__} has no scaling any more; call scalelong.apply again.")
        return root
