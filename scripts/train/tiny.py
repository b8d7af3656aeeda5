"""Makes tiny random models of other kinds than the trained checkpoint, and transformers' results for them.

    python3 scripts/train/tiny.py --out examples/generate/tests/tiny
"""

import argparse
import json
from pathlib import Path

import torch
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM

from goldens import load, write_goldens

VOCAB = 96
SHARED = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    moe_intermediate_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    qk_nope_head_dim=16,
    v_head_dim=16,
    max_position_embeddings=128,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    bos_token_id=None,
    eos_token_id=None,
)


def yarn(**more):
    common = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 16}
    return {**common, "beta_fast": 32, "beta_slow": 1, **more}


# Softmax-gated experts after a dense layer, no low-rank queries, no YaRN.
V2_LITE = DeepseekV2Config(
    **SHARED,
    kv_lora_rank=256, qk_rope_head_dim=32, q_lora_rank=None,
    first_k_dense_replace=1, n_routed_experts=6, n_shared_experts=2, num_experts_per_tok=3,
    topk_method="greedy", routed_scaling_factor=1.0,
)
# Experts in groups in all layers, low-rank queries, YaRN, biases, P other than V.
V2_GROUPS = DeepseekV2Config(
    **SHARED | dict(qk_nope_head_dim=24, moe_intermediate_size=8, rope_parameters=yarn(mscale=0.707, mscale_all_dim=0.707)),
    kv_lora_rank=256, qk_rope_head_dim=64, q_lora_rank=24, attention_bias=True, mlp_bias=True,
    first_k_dense_replace=0, n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=2,
    topk_method="group_limited_greedy", n_group=4, topk_group=2, routed_scaling_factor=4.0,
)
# Rotary halves instead of pairs, weights that are not normalised, tied embeddings, three files.
V3_HALVES = DeepseekV3Config(
    **SHARED | dict(num_attention_heads=3, num_key_value_heads=3, hidden_size=24, qk_nope_head_dim=8, v_head_dim=8),
    kv_lora_rank=512, qk_rope_head_dim=64, q_lora_rank=None, rope_interleave=False, tie_word_embeddings=True,
    first_k_dense_replace=1, n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2,
    n_group=1, topk_group=1, norm_topk_prob=False, routed_scaling_factor=2.5, num_mtp_layers=0,
)
# Dense alone, YaRN that scales the rotary part too, and the rotary fields where DeepSeek's own files have them.
V3_DENSE = DeepseekV3Config(
    **SHARED | dict(rope_parameters=yarn(mscale=1.0, mscale_all_dim=0.5)),
    kv_lora_rank=256, qk_rope_head_dim=64, q_lora_rank=16,
    first_k_dense_replace=2, n_routed_experts=4, n_group=1, topk_group=1, num_mtp_layers=0,
)
MODELS = {"v2-lite": V2_LITE, "v2-groups": V2_GROUPS, "v3-halves": V3_HALVES, "v3-dense": V3_DENSE}
SHARDED = {"v3-halves": "100KB"}
OLD_FIELDS = {"v3-dense"}


@torch.no_grad()
def randomise(model):
    """Large enough weights that attention and routing matter: the class's own initialisation gives logits of nearly 0."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if "norm" in name:
            tensor.uniform_(0.5, 1.5)
        elif "correction_bias" in name or name.endswith(".bias"):
            tensor.normal_(0, 0.1)
        elif "inv_freq" not in name and "embed_scale" not in name:
            tensor.normal_(0, 1.5 / tensor.shape[-1] ** 0.5)


def to_old_fields(path):
    config = json.loads((path / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    rope["type"] = rope.pop("rope_type")
    config["rope_scaling"] = rope
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--out", required=True, type=Path)
    args = p.parse_args()
    for seed, (name, config) in enumerate(MODELS.items()):
        torch.manual_seed(seed)
        path = args.out / name
        of = DeepseekV2ForCausalLM if isinstance(config, DeepseekV2Config) else DeepseekV3ForCausalLM
        model = of(config)
        randomise(model)
        model.save_pretrained(path, max_shard_size=SHARDED.get(name, "1GB"))
        (path / "generation_config.json").unlink(missing_ok=True)
        before = load(path)
        if name in OLD_FIELDS:
            to_old_fields(path)
        prompt = torch.randint(VOCAB, (24,)).tolist()
        after = load(path)
        same = torch.equal(before(torch.tensor([prompt])).logits, after(torch.tensor([prompt])).logits)
        assert same, f"{name}: the old fields are read otherwise"
        for file in path.iterdir():
            file.chmod(0o644)
        write_goldens(path, after, prompt, 8, [1.0] * config.num_hidden_layers, ["f32", "f16"])


if __name__ == "__main__":
    main()
