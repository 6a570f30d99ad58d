"""The networks: U-ViT, ours, and diffusers' UNets under our presets."""
