"""A diffusers pipeline for class-conditional models, models on latents, and models that keep their scaling.

Exported folders carry a copy of this file, so it imports nothing of the package but the package itself.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers import DiffusionPipeline, ImagePipelineOutput
from diffusers.utils.torch_utils import randn_tensor

try:  # noqa: SIM105 - diffusers passes over imports that a try guards
    import scalelong  # noqa: F401 - diffusers looks for U-ViT among the modules that are imported
except ImportError:
    pass  # a UNet without scaling needs diffusers alone


class ScaleLongPipeline(DiffusionPipeline):
    """`pipe(class_labels=[3, 3, 7], guidance_scale=2.0).images`; an unconditional model takes `batch_size=`.

    `num_classes` is None for an unconditional model. `null_class` is the label that stands for none in
    guidance; None where the model was trained without label dropout. `vae` decodes the latents of a model that
    was trained on them.
    """

    model_cpu_offload_seq = "unet->vae"
    _optional_components = ["vae"]  # noqa: RUF012 - as diffusers declares it

    def __init__(
        self,
        unet: Any,
        scheduler: Any,
        vae: Any = None,
        num_classes: int | None = None,
        null_class: int | None = None,
    ):
        super().__init__()
        if "scalelong" in unet.config and not hasattr(unet, "skip_scaling"):
            raise ValueError(
                "this model was trained with scaled skips, and diffusers alone loads it without; "
                "use scalelong.load_pipeline(folder)."
            )
        self.register_modules(unet=unet, scheduler=scheduler, vae=vae)
        self.register_to_config(num_classes=num_classes, null_class=null_class)

    @torch.no_grad()
    def __call__(
        self,
        batch_size: int | None = None,
        num_inference_steps: int = 50,
        generator: torch.Generator | list[torch.Generator] | None = None,
        class_labels: int | list[int] | torch.Tensor | None = None,
        guidance_scale: float = 1.0,
        output_type: str = "pil",
        return_dict: bool = True,
    ) -> ImagePipelineOutput | tuple[Any]:
        """Draw images. Without labels each class comes in turn; one label serves the whole batch.

        `guidance_scale` is the usual w: ε_null + w (ε_class - ε_null), 1 for none.
        """
        device = self._execution_device
        labels = self._labels(class_labels, batch_size, device)
        count = len(labels) if labels is not None else batch_size or 1
        self._check_guidance(guidance_scale)
        size = self.unet.config.sample_size
        height, width = (size, size) if isinstance(size, int) else size
        shape = (count, self.unet.config.in_channels, height, width)
        image = randn_tensor(shape, generator=generator, device=device, dtype=self.unet.dtype)
        self.scheduler.set_timesteps(num_inference_steps)
        for t in self.progress_bar(self.scheduler.timesteps):
            noise = self._predict(image, t, labels, guidance_scale)
            image = self.scheduler.step(noise, t, image, generator=generator).prev_sample
        image = (self._decoded(image) / 2 + 0.5).clamp(0, 1).float()
        if output_type != "pt":
            image = image.cpu().permute(0, 2, 3, 1).numpy()
            image = self.numpy_to_pil(image) if output_type == "pil" else image
        self.maybe_free_model_hooks()
        return ImagePipelineOutput(images=image) if return_dict else (image,)

    def _decoded(self, image: torch.Tensor) -> torch.Tensor:
        if self.vae is None:
            return image
        shift = self.vae.config.get("shift_factor") or 0.0
        return self.vae.decode(image / self.vae.config.scaling_factor + shift).sample

    def _predict(self, image: torch.Tensor, t: Any, labels: torch.Tensor | None, w: float) -> torch.Tensor:
        if labels is None:
            return self.unet(image, t).sample
        if w == 1:
            return self.unet(image, t, class_labels=labels).sample
        null = torch.full_like(labels, self.config.null_class)
        both = self.unet(torch.cat([image, image]), t, class_labels=torch.cat([labels, null])).sample
        conditional, unconditional = both.chunk(2)
        return unconditional + w * (conditional - unconditional)

    def _labels(self, given: Any, batch_size: int | None, device: torch.device) -> torch.Tensor | None:
        classes = self.config.num_classes
        if classes is None:
            if given is not None:
                raise ValueError(f"this model is unconditional; leave class_labels out, got {given!r}.")
            return None
        labels = torch.arange(batch_size or 1) % classes if given is None else torch.as_tensor(given).long()
        if labels.ndim == 0:
            labels = labels.expand(batch_size or 1)
        if batch_size not in (None, len(labels)):
            raise ValueError(
                f"batch_size is the number of class_labels, {len(labels)}, or left out; got {batch_size}."
            )
        if len(labels) == 0 or labels.min() < 0 or labels.max() >= classes:
            raise ValueError(f"class_labels are in 0 … {classes - 1}, at least one of them; got {given!r}.")
        return labels.to(device)

    def _check_guidance(self, w: float) -> None:
        if w != 1 and self.config.null_class is None:
            raise ValueError(
                f"guidance_scale is 1 for a model trained without classes or without label dropout, got {w}."
            )
