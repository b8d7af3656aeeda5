"""Makes tiny random models whose attention is sparse, of transformers' classes DeepseekV32 and GlmMoeDsa, and their results.

    python3 scripts/train/sparse.py --out examples/generate/tests/tiny

Weights are f16. The runs, and the dtypes of their caches:
  f32              f32, the classes as they are
  f16, bf16, e4m3  an index cache of this dtype, whose keys, as the queries, go through a Hadamard transform and are rounded as in
                   DeepSeek's code (rounded_indexer.py); the cache of keys and values f32
  default          f16, and an index cache of e4m3

DIR/NAME/goldens.safetensors has what tiny.py's have and `lists.RUN`, i32 [full layers, tokens, index_topk]: the positions that each
token attends, ascending, then -1. The prompt is the one of many whose lists are the clearest, so that no last bit of a score decides one.
"""

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import DeepseekV32Config, DeepseekV32ForCausalLM, GlmMoeDsaConfig, GlmMoeDsaForCausalLM

from goldens import greedy, load
from rounded import DTYPES, Rounded
from rounded_indexer import Watched
from tiny import VOCAB, randomise, yarn

PROMPT, NEW = 36, 8
SHARED = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    moe_intermediate_size=16,
    num_attention_heads=2,
    num_key_value_heads=2,
    q_lora_rank=16,
    qk_rope_head_dim=64,
    index_topk=12,
    max_position_embeddings=128,
    n_routed_experts=4,
    n_shared_experts=1,
    num_experts_per_tok=2,
    bos_token_id=None,
    eos_token_id=None,
)
# A list in every layer; index keys rotate by halves and the others by pairs; YaRN, experts in groups.
V32 = DeepseekV32Config(
    **SHARED,
    num_hidden_layers=3, kv_lora_rank=512, qk_nope_head_dim=16, v_head_dim=16, index_n_heads=8,
    first_k_dense_replace=1, n_group=2, topk_group=1, routed_scaling_factor=2.5,
    rope_parameters=yarn(mscale=1.0, mscale_all_dim=1.0),
)
# One list for four layers, and the fifth's own; all rotate by pairs; P other than V.
GLM = GlmMoeDsaConfig(
    **SHARED,
    num_hidden_layers=5, kv_lora_rank=256, qk_nope_head_dim=24, v_head_dim=32, index_n_heads=7,
    first_k_dense_replace=2, n_group=1, topk_group=1, routed_scaling_factor=1.5,
    indexer_types=["full", "shared", "shared", "shared", "full"],
    rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
)
RUNS = {dtype: ("f32", dtype) for dtype in DTYPES} | {"default": ("f16", "e4m3")}
MODELS = {"v32": (V32, DeepseekV32ForCausalLM), "glm-dsa": (GLM, GlmMoeDsaForCausalLM)}


@torch.no_grad()
def make(config, of, path):
    model = of(config)
    randomise(model)
    for name, tensor in model.named_parameters():
        if name.endswith("k_norm.bias"):
            tensor.normal_(0, 0.1)
        tensor.data = tensor.data.half()
    model.config.dtype = torch.float16
    model.save_pretrained(path)
    (path / "generation_config.json").unlink(missing_ok=True)


def run(model, prompt, dtype, index):
    """Tokens, logits, lists, how clear the lists are, and how clear the greedy tokens."""
    with Watched(model, index) as watched:
        tokens, logits = greedy(model, prompt, NEW, cache_of(model, dtype))
    best = logits[len(prompt) - 1 :].topk(2).values
    return tokens, logits, watched.lists(), watched.clear.min().item(), (best[:, 0] - best[:, 1]).min().item()


def cache_of(model, dtype):
    return Rounded(model.config, dtype, [1.0] * model.config.num_hidden_layers)


@torch.no_grad()
def clearest_prompt(model, trials):
    """Of random prompts. The clearness of a list is the gap between the last score in it and the next, as a part of the largest score."""
    prompts = torch.randint(VOCAB, (trials, PROMPT))
    clear = torch.ones(trials)
    for dtype, index in RUNS.values():
        with Watched(model, index) as watched:
            model(prompts, cache=cache_of(model, dtype), use_cache=True)
        clear = clear.minimum(watched.clear)
    best = (0.0, None)
    for prompt in prompts[clear.argsort(descending=True)[:20]].tolist():
        runs = [run(model, prompt, *dtypes) for dtypes in RUNS.values()]
        clearest = min(min(lists, tokens / 4) for *_, lists, tokens in runs)
        best = max(best, (clearest, prompt))
    return best[1]


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", required=True, type=Path)
    p.add_argument("--trials", type=int, default=2000)
    args = p.parse_args()
    torch.set_num_threads(1)
    for seed, (name, (config, of)) in enumerate(MODELS.items()):
        torch.manual_seed(seed)
        path = args.out / name
        make(config, of, path)
        model = load(path)
        prompt = clearest_prompt(model, args.trials)
        tensors = {}
        for which, dtypes in RUNS.items():
            tokens, logits, lists, by_lists, by_tokens = run(model, prompt, *dtypes)
            tensors[f"tokens.{which}"] = torch.tensor(tokens, dtype=torch.int32)
            tensors[f"logits.{which}"] = logits.contiguous()
            tensors[f"lists.{which}"] = lists
            same = (lists == tensors["lists.f32"]).all(-1).float().mean().item()
            print(f"{name}, {which}: lists are clear by {by_lists:.5f}, tokens by {by_tokens:.4f}; {100 * same:.1f} % of the lists are "
                  f"those of f32; largest logit {logits.abs().max():.2f}")
        about = {"prompt_tokens": str(PROMPT), "k_scales": json.dumps([1.0] * config.num_hidden_layers)}
        save_file(tensors, path / "goldens.safetensors", metadata=about)
        for file in path.iterdir():
            file.chmod(0o644)


if __name__ == "__main__":
    main()
