"""Saves what transformers computes with a checkpoint (eager attention, f32, weights as stored), for the tests of examples/generate.

    python3 scripts/train/goldens.py --model MODEL_DIR --text train.txt --held-out held_out.txt --prompt TEXT --out DIR

One set for each dtype of the cache, its rows rounded to it:
  MODEL_DIR/kv_cache_scales.json   k_scale of each layer for e4m3, from the training text, in the form that vLLM reads
  DIR/goldens.safetensors          tokens and logits of the prompt and of 64 tokens decoded greedily; the rows of the coarse caches
  DIR/held_out.json                loss and right predictions of each window of the held-out text
"""

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from rounded import DTYPES, TORCH, Largest, Rounded, power_of_two_scale


def load(path, device="cpu"):
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    return model.eval().to(device)


@torch.no_grad()
def greedy(model, prompt, count, cache):
    """Tokens, prompt first, and their logits: the prompt in one call, then token by token."""
    tokens = list(prompt)
    logits = [model(torch.tensor([tokens]), past_key_values=cache, use_cache=True).logits[0]]
    for _ in range(count):
        tokens.append(int(logits[-1][-1].argmax()))
        logits.append(model(torch.tensor([tokens[-1:]]), past_key_values=cache, use_cache=True).logits[0])
    return tokens, torch.cat(logits)


@torch.no_grad()
def calibrate(model, ids, window):
    cache_of = lambda: Largest(model.config)
    amax = [0.0] * model.config.num_hidden_layers
    for at in range(0, min(len(ids), 64 * window) - window, window):
        cache = cache_of()
        model(torch.tensor([ids[at : at + window]], device=model.device), past_key_values=cache, use_cache=True)
        amax = [max(pair) for pair in zip(amax, cache.amax)]
    return amax, [power_of_two_scale(x) for x in amax]


@torch.no_grad()
def score(model, ids, window, cache_of):
    """Summed loss and right predictions of each window, which begins with an empty cache."""
    losses, right = [], []
    for at in range(0, len(ids) - window, window):
        row = torch.tensor(ids[at : at + window + 1], device=model.device)
        logits = model(row[None, :-1], past_key_values=cache_of(), use_cache=True).logits[0]
        losses.append(torch.nn.functional.cross_entropy(logits, row[1:], reduction="sum").item())
        right.append(int((logits.argmax(-1) == row[1:]).sum()))
    return {"loss": [round(x, 5) for x in losses], "right": right}


def write_scales(path, model, scales):
    layers = {str(layer): scale for layer, scale in enumerate(scales)}
    kv_cache = {"dtype": "float8_e4m3fn", "scaling_factor": {"0": layers}}
    about = {"model_type": model.config.model_type, "kv_cache": kv_cache}
    (path / "kv_cache_scales.json").write_text(json.dumps(about, indent=1) + "\n")


def write_goldens(path, model, prompt, count, scales, dtypes, text_of=None):
    tensors, about = {}, {"prompt_tokens": str(len(prompt)), "k_scales": json.dumps(scales)}
    for dtype in dtypes:
        cache = Rounded(model.config, dtype, scales)
        tokens, logits = greedy(model, prompt, count, cache)
        best = logits.topk(2).values
        gap = (best[:, 0] - best[:, 1])[len(prompt) - 1 :].min().item()
        tensors[f"tokens.{dtype}"] = torch.tensor(tokens, dtype=torch.int32)
        tensors[f"logits.{dtype}"] = logits.contiguous()
        if dtype in ("bf16", "e4m3"):
            # So coarse that a last bit before rounding may change a logit by more than the tests allow.
            tensors[f"rows.{dtype}"] = cache.rows().to(TORCH[dtype])
        if text_of:
            about[f"text.{dtype}"] = text_of(tokens[len(prompt) :])
        print(f"{path.name} {dtype}: smallest gap of the best token to the next {gap:.4f}, largest logit {logits.abs().max():.2f}")
    save_file(tensors, path / "goldens.safetensors", metadata=about)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", required=True, type=Path)
    p.add_argument("--text", required=True)
    p.add_argument("--held-out", required=True)
    p.add_argument("--prompt", required=True)
    p.add_argument("--out", required=True, type=Path)
    p.add_argument("--window", type=int, default=512)
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = p.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    ids_of = lambda path: tokenizer.encode(Path(path).read_text()).ids

    fast = load(args.model, args.device)
    amax, scales = calibrate(fast, ids_of(args.text), args.window)
    print(f"largest stored magnitudes {[round(x, 3) for x in amax]}, k_scales {scales}")
    write_scales(args.model, fast, scales)
    held_out = ids_of(args.held_out)
    scores = {"window": args.window}
    for dtype in DTYPES:
        scores[dtype] = score(fast, held_out, args.window, lambda: Rounded(fast.config, dtype, scales))
        tokens = args.window * len(scores[dtype]["loss"])
        loss, right = sum(scores[dtype]["loss"]) / tokens, sum(scores[dtype]["right"]) / tokens
        print(f"held out, {dtype}: loss {loss:.5f}, perplexity {2.718281828459045 ** loss:.4f}, right {100 * right:.3f} %")
    (args.out / "held_out.json").write_text(json.dumps(scores) + "\n")

    # On the CPU, so that no card's arithmetic changes the f32 results.
    model = load(args.model)
    write_goldens(args.out, model, tokenizer.encode(args.prompt).ids, 64, scales, DTYPES, tokenizer.decode)


if __name__ == "__main__":
    main()
