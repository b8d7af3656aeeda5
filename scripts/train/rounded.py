"""A transformers cache whose tokens are rounded to a dtype, as a paged cache in that dtype holds them."""

import torch
from transformers import DynamicCache

E4M3_MAX = 448.0
TORCH = {"f16": torch.float16, "bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}
DTYPES = ["f32", "f16", "bf16", "e4m3"]


def round_to(x, dtype, k_scale=1.0):
    if dtype == "f32":
        return x
    if dtype == "e4m3":
        codes = (x / k_scale).clamp(-E4M3_MAX, E4M3_MAX).to(TORCH[dtype])
        return codes.float() * k_scale
    return x.to(TORCH[dtype]).float()


class Rounded(DynamicCache):
    """A token's cache entry, the normed latent and the rotated key, is rounded before any token attends it, itself included."""

    def __init__(self, config, dtype, k_scales):
        super().__init__(config=config)
        self.dtype, self.k_scales = dtype, k_scales

    def update(self, latent, rotary, layer, *args, **kwargs):
        rows = (round_to(x, self.dtype, self.k_scales[layer]) for x in (latent, rotary))
        return super().update(*rows, layer, *args, **kwargs)

    def rows(self):
        """`[layers, tokens, L + R]` of one sequence, without `k_scale`. Rotated pairs are apart: first parts, then second parts."""
        layers = [torch.cat([layer.keys, layer.values], dim=-1)[0, 0] / scale_of(self.dtype, scale)
                  for layer, scale in zip(self.layers, self.k_scales)]
        return torch.stack(layers)


def scale_of(dtype, k_scale):
    return k_scale if dtype == "e4m3" else 1.0


class Largest(DynamicCache):
    """Notes the largest magnitude that each layer would store."""

    def __init__(self, config):
        super().__init__(config=config)
        self.amax = [0.0] * config.num_hidden_layers

    def update(self, latent, rotary, layer, *args, **kwargs):
        self.amax[layer] = max(self.amax[layer], latent.abs().max().item(), rotary.abs().max().item())
        return super().update(latent, rotary, layer, *args, **kwargs)


def power_of_two_scale(amax):
    """The next power of two of amax / 448: e4m3 codes are then the same on every device."""
    return 2.0 ** torch.tensor(amax / E4M3_MAX).log2().ceil().item()
