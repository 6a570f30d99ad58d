"""The scaled networks computed by hand, without `scalelong.skips`: an independent answer to compare with.

Each function takes the PLAIN model, the gates' tensors from the scaled one's state dict, and a spec.
"""

import copy
import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.utils.torch_utils import apply_freeu
from torch import Tensor, nn

from tests.contracts.zoo import Case

ACTIVATIONS = {"relu": F.relu, "elu": F.elu, "mish": F.mish}


def coefficient(case: Case, spec: str, state: Mapping[str, Tensor], i: int, skip: Tensor) -> Tensor | float:
    """The i-th skip's coefficient from its equation, shaped to multiply the skip."""
    n = len(case.merges)
    name, _, rest = spec.partition(":")
    if name == "none":
        return 1.0
    if name == "1/sqrt2":
        return 1 / math.sqrt(2)
    if name == "uniform":
        return float(rest)
    if name == "cs":
        return math.prod([float(rest)] * i)
    if name == "cs-reversed":
        return math.prod([float(rest)] * (n - i))
    if name == "scalar":
        return state[f"{case.merges[i]}.skip_scale.scale"]
    if name == "skip-norm":
        numbers = skip.flatten(1) if skip.dim() == 4 else skip
        size = (
            (numbers.pow(2).sum(-1) / numbers.shape[-1] + 1e-6)
            .sqrt()
            .reshape(-1, *(1,) * 3 if skip.dim() == 4 else (skip.shape[1], 1))
        )
        return state[f"{case.merges[i]}.skip_scale.gain"] / size
    options = dict(option.split("=") for option in rest.split(",")) if rest else {}
    if skip.dim() == 4:
        pooled, expand = skip.flatten(2).sum(2) / (skip.shape[2] * skip.shape[3]), (..., None, None)
    elif name == "ls-channel":
        pooled, expand = skip.sum(1) / skip.shape[1], (slice(None), None)
    else:
        pooled, expand = skip.sum(2) / skip.shape[2], (..., None)
    own = name == "ls-per-skip" or options.get("shared") == "false"
    gate = f"{case.merges[i]}.skip_scale.gate" if own else f"skip_scaling.gates.{pooled.shape[1]}"
    if name == "ie":
        logits = state[f"{gate}.gamma"] * pooled + state[f"{gate}.beta"]
    else:
        hidden = pooled @ state[f"{gate}.layer1.weight"].T + state[f"{gate}.layer1.bias"]
        hidden = ACTIVATIONS[options.get("act", "relu")](hidden)
        logits = hidden @ state[f"{gate}.layer2.weight"].T + state[f"{gate}.layer2.bias"]
    return (1 / (1 + torch.exp(-logits)))[expand]


def forward(
    case: Case,
    plain: nn.Module,
    inputs: dict[str, Any],
    spec: str,
    state: Mapping[str, Tensor],
    placement: str,
) -> Tensor:
    run = {"uvit": uvit, "unet": unet, "video": video, "hunyuan": hunyuan}[case.kind]
    return run(case, plain, inputs, spec, state, placement)


# U-ViT, from its state dict alone


def uvit(
    case: Case,
    plain: nn.Module,
    inputs: dict[str, Any],
    spec: str,
    gates: Mapping[str, Tensor],
    placement: str,
) -> Tensor:
    w, heads, p = plain.state_dict(), plain.config.num_attention_heads, plain.config.patch_size
    image, t = inputs["sample"], inputs["timestep"]
    batch, channels, height, width = image.shape
    dim = w["pos_embed"].shape[2]
    # Patches by hand: the strided convolution is a matrix product.
    patches = image.unfold(2, p, p).unfold(3, p, p)  # [B, C, h, w, p, p]
    patches = patches.permute(0, 2, 3, 1, 4, 5).reshape(batch, -1, channels * p * p)
    x = patches @ w["patch_embed.proj.weight"].flatten(1).T + w["patch_embed.proj.bias"]
    freqs = torch.tensor([10000 ** (-k / (dim // 2)) for k in range(dim // 2)], dtype=image.dtype)
    time = torch.cat([torch.cos(t[:, None] * freqs), torch.sin(t[:, None] * freqs)], 1)[:, None].to(image.dtype)
    extra = [time]
    if "label_emb.weight" in w:
        extra = [w["label_emb.weight"][inputs["class_labels"]][:, None], time]
    if "context_embed.weight" in w:
        extra = [
            time,
            inputs["encoder_hidden_states"] @ w["context_embed.weight"].T + w["context_embed.bias"],
        ]
    x = torch.cat([*extra, x], 1) + w["pos_embed"]

    def layer_norm(x: Tensor, name: str) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return (
            centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w[f"{name}.weight"]
            + w[f"{name}.bias"]
        )

    def block(x: Tensor, name: str) -> Tensor:
        qkv = layer_norm(x, f"{name}.norm1") @ w[f"{name}.attn.qkv.weight"].T
        q, k, v = qkv.view(batch, -1, 3, heads, dim // heads).permute(2, 0, 3, 1, 4)
        attention = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(dim // heads), -1) @ v
        attention = attention.permute(0, 2, 1, 3).reshape(batch, -1, dim)
        x = x + attention @ w[f"{name}.attn.proj.weight"].T + w[f"{name}.attn.proj.bias"]
        hidden = layer_norm(x, f"{name}.norm2") @ w[f"{name}.mlp.fc1.weight"].T + w[f"{name}.mlp.fc1.bias"]
        hidden = hidden * 0.5 * (1 + torch.erf(hidden / math.sqrt(2)))
        return x + hidden @ w[f"{name}.mlp.fc2.weight"].T + w[f"{name}.mlp.fc2.bias"]

    half = plain.config.num_layers // 2
    skips = []
    for i in range(half):
        x = block(x, f"in_blocks.{i}")
        skips.append(x)
    x = block(x, "mid_block")
    for i in range(half):
        skip = skips[half - 1 - i]
        skip = skip * coefficient(case, spec, gates, half - 1 - i, skip)
        name = f"out_blocks.{i}"
        x = torch.cat([x, skip], -1) @ w[f"{name}.skip_linear.weight"].T + w[f"{name}.skip_linear.bias"]
        x = block(x, name)
    x = layer_norm(x, "norm") @ w["decoder_pred.weight"].T + w["decoder_pred.bias"]
    x = x[:, len(x[0]) - (height // p) * (width // p) :]
    out = torch.empty_like(image)
    for row in range(height // p):
        for col in range(width // p):
            token = x[:, row * (width // p) + col].view(batch, p, p, channels)
            out[:, :, row * p : (row + 1) * p, col * p : (col + 1) * p] = token.permute(0, 3, 1, 2)
    if "final_layer.weight" in w:
        out = F.conv2d(out, w["final_layer.weight"], w["final_layer.bias"], padding=1)
    return out


# diffusers' UNets: the encoder runs as it is, the decoder by hand


def unet(
    case: Case,
    plain: nn.Module,
    inputs: dict[str, Any],
    spec: str,
    gates: Mapping[str, Tensor],
    placement: str,
) -> Tensor:
    calls = _record_calls(plain, plain.up_blocks, inputs, ("hidden_states", "res_hidden_states_tuple", "temb"))
    x, index = calls[0]["hidden_states"], len(case.merges)
    for up_block, call in zip(plain.up_blocks, calls, strict=True):
        skips = list(call["res_hidden_states_tuple"])
        attentions = getattr(up_block, "attentions", [None] * len(up_block.resnets))
        for resnet, attention in zip(up_block.resnets, attentions, strict=True):
            index -= 1
            skip = skips.pop()
            if placement == "concat":
                skip = skip * coefficient(case, spec, gates, index, skip)
            if getattr(up_block, "b1", None):
                x, skip = apply_freeu(
                    up_block.resolution_idx,
                    x.clone(),
                    skip,
                    s1=up_block.s1,
                    s2=up_block.s2,
                    b1=up_block.b1,
                    b2=up_block.b2,
                )
            c = coefficient(case, spec, gates, index, skip) if placement == "norm" else 1.0
            x = _resnet(resnet, x, skip, call["temb"], c)
            if attention is not None:
                text = call.get("encoder_hidden_states")
                x = attention(x) if text is None else attention(x, encoder_hidden_states=text)
                x = x if isinstance(x, Tensor) else x[0]
        for upsampler in up_block.upsamplers or ():
            x = upsampler(x, call["temb"]) if hasattr(upsampler, "time_emb_proj") else upsampler(x)
    return plain.conv_out(plain.conv_act(plain.conv_norm_out(x)))


def _resnet(resnet: nn.Module, main: Tensor, skip: Tensor, temb: Tensor, c: Tensor | float) -> Tensor:
    x = torch.cat([main, skip], 1)
    norm = resnet.norm1
    groups = x.unflatten(1, (norm.num_groups, -1)).flatten(2)
    variance, mean = torch.var_mean(groups, 2, keepdim=True, correction=0)
    h = ((groups - mean) / (variance + norm.eps).sqrt()).view_as(x) * norm.weight[:, None, None] + norm.bias[
        :, None, None
    ]
    h = torch.cat([h[:, : main.shape[1]], h[:, main.shape[1] :] * c], 1)
    h = resnet.conv1(h * torch.sigmoid(h))
    shift = resnet.time_emb_proj(temb if resnet.skip_time_act else F.silu(temb))[:, :, None, None]
    if resnet.time_embedding_norm == "scale_shift":
        scale, shift = shift.chunk(2, 1)
        h = resnet.norm2(h) * (1 + scale) + shift
    else:
        h = resnet.norm2(h + shift)
    h = resnet.conv2(F.silu(h))
    return (resnet.conv_shortcut(torch.cat([main, skip * c], 1)) + h) / resnet.output_scale_factor


# diffusers' UNets of videos: the blocks that merge a skip, by hand, in the place of their own


def video(
    case: Case,
    plain: nn.Module,
    inputs: dict[str, Any],
    spec: str,
    gates: Mapping[str, Tensor],
    placement: str,
) -> Tensor:
    model = copy.deepcopy(plain)
    for index, (name, width) in enumerate(zip(case.merges, case.widths, strict=True)):
        model.get_submodule(name).forward = functools.partial(
            _merging, model.get_submodule(name), case, spec, gates, placement, index, width
        )
    return model(**inputs).sample


def _merging(
    resnet: nn.Module,
    case: Case,
    spec: str,
    gates: Mapping[str, Tensor],
    placement: str,
    index: int,
    width: int,
    input_tensor: Tensor,
    temb: Tensor,
) -> Tensor:
    main, skip = input_tensor.tensor_split([input_tensor.shape[1] - width], 1)
    c = coefficient(case, spec, gates, index, skip)
    return (
        _resnet(resnet, main, skip * c, temb, 1.0)
        if placement == "concat"
        else _resnet(resnet, main, skip, temb, c)
    )


# HunyuanDiT: its blocks by hand


def hunyuan(
    case: Case,
    plain: nn.Module,
    inputs: dict[str, Any],
    spec: str,
    gates: Mapping[str, Tensor],
    placement: str,
) -> Tensor:
    calls = _record_calls(plain, plain.blocks, inputs, ("hidden_states",))
    x, call = calls[0]["hidden_states"], calls[0]
    kept: list[Tensor] = []
    for layer, block in enumerate(plain.blocks):
        if layer > len(plain.blocks) // 2:
            skip = kept.pop()
            c = coefficient(case, spec, gates, len(kept), skip)
            norm = block.skip_norm
            joined = torch.cat([x, skip * c if placement == "concat" else skip], -1).float()
            joined = F.layer_norm(
                joined, norm.normalized_shape, norm.weight.float(), norm.bias.float(), norm.eps
            ).to(x.dtype)
            if placement == "norm":
                joined = torch.cat([joined[..., : x.shape[-1]], joined[..., x.shape[-1] :] * c], -1)
            x = joined @ block.skip_linear.weight.T + block.skip_linear.bias
        x = x + block.attn1(block.norm1(x, call["temb"]), image_rotary_emb=call["image_rotary_emb"])
        text = call["encoder_hidden_states"]
        x = x + block.attn2(block.norm2(x), encoder_hidden_states=text, image_rotary_emb=call["image_rotary_emb"])
        x = x + block.ff(block.norm3(x))
        if layer < len(plain.blocks) // 2 - 1:
            kept.append(x)
    x = plain.proj_out(plain.norm_out(x, call["temb"].float()))
    p, side = plain.config.patch_size, inputs["hidden_states"].shape[-1] // plain.config.patch_size
    x = x.view(len(x), side, side, p, p, -1)
    return torch.einsum("nhwpqc->nchpwq", x).reshape(len(x), -1, side * p, side * p)


def _record_calls(
    model: nn.Module, blocks: nn.ModuleList, inputs: dict[str, Any], positional: tuple[str, ...]
) -> list[dict[str, Any]]:
    """What each block was called with in a plain run, by argument name."""
    calls: list[dict[str, Any]] = []

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # FreeU writes into the main path: keep what it was.
        call = dict(zip(positional, args, strict=False)) | kwargs
        calls.append({k: v.clone() if isinstance(v, Tensor) else v for k, v in call.items()})

    handles = [block.register_forward_pre_hook(note, with_kwargs=True) for block in blocks]
    model(**inputs)
    for handle in handles:
        handle.remove()
    return calls
