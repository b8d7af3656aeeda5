"""Makes tiny random models of types that have DeepSeek's attention and something of their own, and transformers' results for them.

    python3 scripts/train/models.py --out examples/generate/tests/tiny

DIR/NAME has, besides what tiny.py makes:
  config-4.json         the config with the fields that transformers 4.57 and the models' own repositories have, checked to give the same
                        logits
  goldens.safetensors   for each dtype of the cache the prompt and 32 greedy tokens; logits for f32 alone

Weights are f16 or bf16. The prompt is the one of many whose greedy tokens are the clearest with every dtype, so that no code of a cache
that is rounded to the other side decides one.
"""

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import (AutoModelForCausalLM, AutoModelForImageTextToText, AXK1Config, Glm4MoeLiteConfig, Kimi_K25Config, MiniCPM3Config,
                          Mistral4Config, Mistral4ForCausalLM, SarvamMLAConfig, YoutuConfig)

from rounded import DTYPES, Rounded
from tiny import randomise, yarn

VOCAB, PROMPT, NEW = 64, 24, 32
SHARED = dict(
    vocab_size=VOCAB,
    hidden_size=8,
    intermediate_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    kv_lora_rank=256,
    qk_rope_head_dim=32,
    qk_nope_head_dim=8,
    v_head_dim=8,
    max_position_embeddings=128,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)
EXPERTS = dict(moe_intermediate_size=8, n_routed_experts=6, n_shared_experts=1, num_experts_per_tok=2, n_group=1, topk_group=1)
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 16,
            "short_factor": [1.0 + 0.02 * i for i in range(16)], "long_factor": [1.5 + 0.3 * i for i in range(16)]}
VISION = dict(patch_size=2, pos_emb_height=2, pos_emb_width=2, pos_emb_time=1, num_attention_heads=1, num_hidden_layers=1, hidden_size=4,
              intermediate_size=4)

MODELS = {
    "youtu": YoutuConfig(**SHARED, q_lora_rank=8, rope_parameters=PLAIN | {"rope_theta": 1600000.0}),
    "glm4-moe-lite": Glm4MoeLiteConfig(**SHARED, **EXPERTS, q_lora_rank=8, rope_parameters=PLAIN, mlp_layer_types=["dense", "sparse"]),
    "sarvam": SarvamMLAConfig(**SHARED, **EXPERTS, rope_parameters=yarn(mscale=1.0, mscale_all_dim=1.0)),
    "kimi-k25": Kimi_K25Config(text_config=dict(model_type="deepseek_v3", **SHARED, **EXPERTS, q_lora_rank=8, first_k_dense_replace=1,
                                                num_mtp_layers=0, rope_parameters=yarn(mscale=1.0, mscale_all_dim=1.0)),
                               vision_config=VISION, projection_hidden_size=4),
    "minicpm3": MiniCPM3Config(**SHARED | dict(hidden_size=16), q_lora_rank=8, scale_emb=3, scale_depth=1.0, dim_model_base=8,
                               rope_parameters=LONGROPE),
    "axk1": AXK1Config(**SHARED, **EXPERTS | dict(n_group=3, topk_group=2), q_lora_rank=8, rope_parameters=PLAIN,
                       mlp_layer_types=["dense", "sparse"]),
    "mistral4": Mistral4Config(**SHARED, **EXPERTS | dict(n_group=3, topk_group=2), q_lora_rank=8, first_k_dense_replace=1,
                               routed_scaling_factor=1.5,
                               rope_parameters=yarn(mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.5)),
}
BF16 = {"youtu", "kimi-k25", "mistral4"}
CLASSES = {"kimi-k25": AutoModelForImageTextToText, "mistral4": Mistral4ForCausalLM}


def load(path):
    return CLASSES.get(path.name, AutoModelForCausalLM).from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


def text_config(model):
    return model.config.get_text_config()


@torch.no_grad()
def make(config, path, dtype):
    of = CLASSES.get(path.name, AutoModelForCausalLM)
    model = of(config) if of is Mistral4ForCausalLM else of.from_config(config)
    randomise(model)
    for tensor in (*model.parameters(), *(it for name, it in model.named_buffers() if "correction_bias" in name)):
        tensor.data = tensor.data.to(dtype)
    model.config.dtype = dtype
    model.save_pretrained(path)
    (path / "generation_config.json").unlink(missing_ok=True)


@torch.no_grad()
def greedy(model, prompts, count, dtype):
    """Tokens of all prompts, their logits, and how clear the least clear token of each prompt is."""
    cache = Rounded(text_config(model), dtype, [1.0] * text_config(model).num_hidden_layers)
    logits = [model(prompts, past_key_values=cache, use_cache=True).logits]
    tokens, clear = [prompts], torch.full((len(prompts),), torch.inf)
    for _ in range(count):
        best = logits[-1][:, -1].topk(2).values
        clear = clear.minimum(best[:, 0] - best[:, 1])
        tokens.append(logits[-1][:, -1:].argmax(-1))
        logits.append(model(tokens[-1], past_key_values=cache, use_cache=True).logits)
    return torch.cat(tokens, 1), torch.cat(logits, 1), clear


def clearest_prompt(model, trials):
    """Of random prompts whose answers are not all one token."""
    prompts = torch.randint(VOCAB, (trials, PROMPT))
    clear, varied = torch.full((trials,), torch.inf), torch.full((trials,), True)
    for dtype in DTYPES:
        tokens, _, of_dtype = greedy(model, prompts, NEW, dtype)
        clear = clear.minimum(of_dtype)
        varied &= torch.tensor([len(set(row)) >= 6 for row in tokens[:, PROMPT:].tolist()])
    return prompts[clear.where(varied, -1).argmax()][None]


def old_fields(name, config):
    """The config as transformers 4.57 or the model's own repository has it."""
    text = config.get("text_config", config)
    rope = text.pop("rope_parameters")
    text["rope_theta"] = rope.pop("rope_theta")
    rope["type"] = rope.pop("rope_type")
    text["rope_scaling"] = None if rope["type"] == "default" else rope
    config["torch_dtype"] = config.pop("dtype")
    layers = text.pop("mlp_layer_types", None)
    if layers:
        text["first_k_dense_replace"] = layers.index("sparse")
    if name == "sarvam":
        for new, old in (("n_routed_experts", "num_experts"), ("n_shared_experts", "num_shared_experts")):
            text[old] = text.pop(new)
        rope["type"] = "deepseek_yarn"
        text["head_dim"] = text["kv_lora_rank"] + text["qk_rope_head_dim"]
    if name == "kimi-k25":
        text["model_type"] = "kimi_k2"
    if name == "minicpm3":
        del text["v_head_dim"]
    return config


@torch.no_grad()
def write_old_config(path, prompt, want):
    new = (path / "config.json").read_text()
    old = json.dumps(old_fields(path.name, json.loads(new)), indent=2) + "\n"
    (path / "config.json").write_text(old)
    same = torch.equal(load(path)(prompt).logits, want)
    assert same, f"{path.name}: the old fields are read otherwise"
    (path / "config.json").write_text(new)
    if path.name == "youtu":
        # The name of configs before transformers had the class.
        old = old.replace('"model_type": "youtu"', '"model_type": "youtu_llm"')
    (path / "config-4.json").write_text(old)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", required=True, type=Path)
    p.add_argument("--trials", type=int, default=1000)
    p.add_argument("--only", choices=MODELS)
    args = p.parse_args()
    torch.set_num_threads(1)
    for seed, (name, config) in enumerate(MODELS.items()):
        if args.only not in (None, name):
            continue
        torch.manual_seed(seed)
        path = args.out / name
        make(config, path, torch.bfloat16 if name in BF16 else torch.float16)
        model = load(path)
        prompt = clearest_prompt(model, args.trials)
        tensors = {}
        for dtype in DTYPES:
            tokens, logits, clear = greedy(model, prompt, NEW, dtype)
            tensors[f"tokens.{dtype}"] = tokens[0].to(torch.int32)
            print(f"{name}, {dtype}: tokens are clear by {clear.item():.4f}; largest logit {logits.abs().max():.2f}")
            if dtype == "f32":
                tensors["logits.f32"] = logits[0].contiguous()
        if name == "minicpm3":
            # Positions that its short factors serve.
            tokens, logits, _ = greedy(model, prompt[:, :8], 8, "f32")
            tensors |= {"tokens.short": tokens[0].to(torch.int32), "logits.short": logits[0].contiguous()}
        about = {"prompt_tokens": str(PROMPT), "k_scales": json.dumps([1.0] * text_config(model).num_hidden_layers)}
        save_file(tensors, path / "goldens.safetensors", metadata=about)
        write_old_config(path, prompt, model(prompt).logits)
        for file in path.iterdir():
            file.chmod(0o644)


if __name__ == "__main__":
    main()
