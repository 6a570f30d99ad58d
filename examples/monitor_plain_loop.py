"""A plain PyTorch loop under the monitor: a U-ViT learns digits until its learning rate jumps by a factor of 30.

    python examples/monitor_plain_loop.py --steps 260 --out runs/monitored-plain

The alarm names what grew, metrics.jsonl and TensorBoard hold the signals of every skip, report.html draws them.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import DDPMScheduler
from sklearn.datasets import load_digits

import scalelong


def main(steps: int, out: Path, jump_at: int = 200) -> scalelong.StabilityMonitor:
    torch.manual_seed(0)
    images = torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 8 - 1
    model = scalelong.UViT(
        sample_size=8, patch_size=2, in_channels=1, hidden_size=32, num_layers=6, num_attention_heads=4
    )
    scalelong.apply(model, "ls")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    noising = DDPMScheduler()
    with scalelong.StabilityMonitor(model, out, on_alarm=lambda alarm: print("ALARM", alarm)) as monitor:  # 1, 2
        for step in range(steps):
            if step == jump_at:
                optimizer.param_groups[0]["lr"] *= 30
            clean = images[torch.randint(len(images), (16,))]
            noise, t = torch.randn_like(clean), torch.randint(1000, (16,))
            predicted = model(noising.add_noise(clean, noise, t), t, return_dict=False)[0]
            losses = F.mse_loss(predicted, noise, reduction="none").mean(dim=(1, 2, 3))
            loss = losses.mean()
            loss.backward()
            monitor.step(loss, timesteps=t, losses=losses)  # 3
            optimizer.step()
            optimizer.zero_grad()
    print(f"{len(monitor.alarms)} alarms; see {out / 'report.html'}")
    return monitor


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=260)
    parser.add_argument("--out", type=Path, default=Path("runs/monitored-plain"))
    arguments = parser.parse_args()
    main(arguments.steps, arguments.out)
