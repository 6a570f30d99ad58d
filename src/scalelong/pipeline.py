"""A diffusers pipeline for models on classes, text or latents, and for models that keep their scaling.

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
    """`pipe(class_labels=[3, 3, 7], guidance_scale=2.0).images`, `pipe(prompt="a red bus").images`; an
    unconditional model takes `batch_size=`.

    `num_classes` is None for an unconditional model. `class_names` are the numbers of the names that
    may be given as `class_labels`, too. `null_class` is the label that stands for none in
    guidance; None where the model was trained without label dropout. `vae` decodes the latents of a model that
    was trained on them. A model on text has its encoder and tokenizer, reads `text_len` tokens, those of padding as
    zeros unless `reads_padding`, and takes guidance if it learned the empty prompt, `null_text`. `process` is edm
    or flow where the scheduler is of that kind, and `target` what the model then predicts.
    """

    model_cpu_offload_seq = "text_encoder->unet->vae"
    _optional_components = ["vae", "text_encoder", "tokenizer"]  # noqa: RUF012 - as diffusers declares it

    def __init__(
        self,
        unet: Any,
        scheduler: Any,
        vae: Any = None,
        text_encoder: Any = None,
        tokenizer: Any = None,
        num_classes: int | None = None,
        null_class: int | None = None,
        text_len: int | None = None,
        reads_padding: bool = False,
        null_text: bool = False,
        process: str | None = None,
        target: str | None = None,
        class_names: dict[str, int] | None = None,
    ):
        super().__init__()
        if "scalelong" in unet.config and not hasattr(unet, "skip_scaling"):
            raise ValueError(
                "this model was trained with scaled skips, and diffusers alone loads it without; "
                "use scalelong.load_pipeline(folder)."
            )
        words = {"text_encoder": text_encoder, "tokenizer": tokenizer}
        self.register_modules(unet=unet, scheduler=scheduler, vae=vae, **words)
        self.register_to_config(num_classes=num_classes, null_class=null_class, class_names=class_names)
        self.register_to_config(text_len=text_len, reads_padding=reads_padding, null_text=null_text)
        self.register_to_config(process=process, target=target)

    @torch.no_grad()
    def __call__(
        self,
        batch_size: int | None = None,
        num_inference_steps: int = 50,
        generator: torch.Generator | list[torch.Generator] | None = None,
        class_labels: int | str | list[int | str] | torch.Tensor | None = None,
        prompt: str | list[str] | None = None,
        guidance_scale: float = 1.0,
        output_type: str = "pil",
        return_dict: bool = True,
    ) -> ImagePipelineOutput | tuple[Any]:
        """Draw images. Without labels each class comes in turn; one label or prompt serves the whole batch.

        `guidance_scale` is the usual w: ε_null + w (ε_told - ε_null), 1 for none.
        """
        device = self._execution_device
        self._check_guidance(guidance_scale)
        told, null = self._told(class_labels, prompt, batch_size, device)
        count = len(next(iter(told.values()))) if told else batch_size or 1
        size = self.unet.config.sample_size
        height, width = (size, size) if isinstance(size, int) else size
        shape = (count, self.unet.config.in_channels, height, width)
        image = randn_tensor(shape, generator=generator, device=device, dtype=self.unet.dtype)
        self.scheduler.set_timesteps(num_inference_steps)
        if self.config.process == "edm":
            image = image * self.scheduler.init_noise_sigma
        for t in self.progress_bar(self.scheduler.timesteps):
            predicted = self._predict(*self._asked(image, t), told, null, guidance_scale)
            slope = self._stepped_by(predicted, image, t)
            image = self.scheduler.step(slope, t, image, generator=generator).prev_sample
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

    def _asked(self, image: torch.Tensor, t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the network sees, and the time it is told: 250 ln σ for EDM, 1000 t - 1 for a flow."""
        if self.config.process == "edm":
            return self.scheduler.scale_model_input(image, t), 1000 * t
        return image, t - 1 if self.config.process == "flow" else t

    def _stepped_by(self, predicted: torch.Tensor, image: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        """The prediction as the scheduler takes it: EDM's F, a flow's velocity ε - x_0, DDIM's any target."""
        process, target = self.config.process, self.config.target
        if process == "flow" and target == "x0":
            return (image - predicted) / (t / self.scheduler.config.num_train_timesteps)
        if process != "edm" or target == "edm":
            return predicted
        sigma, spread = torch.exp(4 * t), self.scheduler.config.sigma_data  # the scheduler's t is ¼ ln σ
        clean = predicted if target == "x0" else image - sigma * predicted
        r = (sigma**2 + spread**2).sqrt()
        return (clean - (spread / r) ** 2 * image) * r / (sigma * spread)

    def _predict(self, image: torch.Tensor, t: Any, told: Any, null: Any, w: float) -> torch.Tensor:
        if w == 1:
            return self.unet(image, t, **told).sample
        joined = {name: torch.cat([told[name], null[name]]) for name in told}
        both = self.unet(torch.cat([image, image]), t, **joined).sample
        conditional, unconditional = both.chunk(2)
        return unconditional + w * (conditional - unconditional)

    def _told(self, labels: Any, prompt: Any, batch_size: int | None, device: torch.device) -> tuple[Any, Any]:
        """The network's arguments for what is asked for, and for nothing in particular."""
        if self.text_encoder is None:
            if prompt is not None:
                raise ValueError(f"this model was trained without text; leave prompt out, got {prompt!r}.")
            classes = self._labels(labels, batch_size, device)
            if classes is None:
                return {}, {}
            null = torch.full_like(classes, self.config.null_class or 0)
            return {"class_labels": classes}, {"class_labels": null}
        if labels is not None:
            raise ValueError(f"this model draws what a prompt says; leave class_labels out, got {labels!r}.")
        prompts = self._prompts(prompt, batch_size)
        null, contexts = self.encode_prompt(["", *prompts]).tensor_split([1])
        return {"encoder_hidden_states": contexts}, {"encoder_hidden_states": null.expand_as(contexts)}

    def _prompts(self, given: Any, batch_size: int | None) -> list[str]:
        prompts = [given] * (batch_size or 1) if isinstance(given, str) else given
        if not isinstance(prompts, (list, tuple)) or not prompts or not all(isinstance(p, str) for p in prompts):
            raise ValueError(f"prompt is a text or a list of some, got {given!r}.")
        if batch_size not in (None, len(prompts)):
            raise ValueError(f"batch_size is the number of prompts, {len(prompts)}, or left out; got {batch_size}.")
        return list(prompts)

    @torch.no_grad()
    def encode_prompt(self, prompts: list[str]) -> torch.Tensor:
        """Texts as the network reads them, [B, L, D]; longer ones are cut."""
        tokens = self.tokenizer(
            prompts, padding="max_length", truncation=True, max_length=self.config.text_len, return_tensors="pt"
        ).to(self._execution_device)
        ids, mask = tokens["input_ids"], tokens["attention_mask"]
        if self.config.reads_padding:
            return self.text_encoder(input_ids=ids).last_hidden_state.to(self.unet.dtype)
        hidden = self.text_encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        return torch.where(mask[:, :, None] > 0, hidden, 0.0).to(self.unet.dtype)

    def _labels(self, given: Any, batch_size: int | None, device: torch.device) -> torch.Tensor | None:
        classes = self.config.num_classes
        if classes is None:
            if given is not None:
                raise ValueError(f"this model is unconditional; leave class_labels out, got {given!r}.")
            return None
        numbers = self._numbers_of(given)
        labels = torch.arange(batch_size or 1) % classes if given is None else torch.as_tensor(numbers).long()
        if labels.ndim == 0:
            labels = labels.expand(batch_size or 1)
        if batch_size not in (None, len(labels)):
            raise ValueError(
                f"batch_size is the number of class_labels, {len(labels)}, or left out; got {batch_size}."
            )
        if len(labels) == 0 or labels.min() < 0 or labels.max() >= classes:
            raise ValueError(f"class_labels are in 0 … {classes - 1}, at least one of them; got {given!r}.")
        return labels.to(device)

    def _numbers_of(self, given: Any) -> Any:
        """Classes by number, in a list where they came in one."""
        if isinstance(given, (list, tuple)):
            return [self._numbers_of(label) for label in given]
        if not isinstance(given, str):
            return given
        names = self.config.class_names or {}
        if given not in names:
            listed = ", ".join(list(names)[:20]) + (" …" if len(names) > 20 else "")
            known = f"the names of its classes are {listed}" if names else "it has no names for its classes"
            raise ValueError(f"class_labels are numbers, or names that the model knows; {known}, got {given!r}.")
        return names[given]

    def _check_guidance(self, w: float) -> None:
        if w != 1 and self.config.null_class is None and not self.config.null_text:
            raise ValueError(
                f"guidance_scale is 1 for a model told nothing, or trained without label dropout, got {w}."
            )
