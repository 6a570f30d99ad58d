"""The loop of diffusers' train_unconditional.py (accelerate, UNet2DModel) under the monitor, on the digits.

    accelerate launch examples/monitor_diffusers_accelerate.py --steps 200 --out runs/monitored-accelerate

Three lines, marked below, are all that the monitor adds.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.optimization import get_scheduler
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import scalelong


def main(steps: int, out: Path, batch: int = 16, pieces: int = 2) -> scalelong.StabilityMonitor:
    accelerator = Accelerator(gradient_accumulation_steps=pieces)
    torch.manual_seed(0)
    model = UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(16, 32),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
    )
    scalelong.apply(model, "cs:0.7", placement="norm")
    images = torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 8 - 1
    loader = DataLoader(TensorDataset(images), batch_size=batch, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    lr_scheduler = get_scheduler("cosine", optimizer, num_warmup_steps=50, num_training_steps=steps)
    noise_scheduler = DDPMScheduler()
    model, optimizer, loader, lr_scheduler = accelerator.prepare(model, optimizer, loader, lr_scheduler)

    monitor = scalelong.StabilityMonitor(model, out, interval=20, scaler=accelerator.scaler)  # 1
    done = 0
    while done < steps:
        for (clean_images,) in loader:
            noise = torch.randn_like(clean_images)
            timesteps = torch.randint(0, 1000, (len(clean_images),), device=clean_images.device)
            noisy_images = noise_scheduler.add_noise(clean_images, noise, timesteps)
            with accelerator.accumulate(model):
                model_output = model(noisy_images, timesteps).sample
                loss = F.mse_loss(model_output.float(), noise.float())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.unscale_gradients()  # in fp16 they are multiplied by a number that changes
                    monitor.step(loss)  # 2
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            done += accelerator.sync_gradients
            if done == steps:
                break
    monitor.close()  # 3
    accelerator.print(f"{len(monitor.alarms)} alarms; see {out / 'report.html'}")
    return monitor


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("runs/monitored-accelerate"))
    arguments = parser.parse_args()
    main(arguments.steps, arguments.out)
