"""Trains a small DeepSeek-V3 model (transformers' own class) on plain text and saves config.json, model.safetensors, tokenizer.json.

    python3 scripts/train/train.py --text train.txt --held-out held_out.txt --out MODEL_DIR
"""

import argparse
import json
import math
import os
import time
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM


def parse():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--text", required=True)
    p.add_argument("--held-out", required=True)
    p.add_argument("--out", required=True)
    p.add_argument("--vocab", type=int, default=1024)
    p.add_argument("--hidden", type=int, default=256)
    p.add_argument("--layers", type=int, default=4)
    p.add_argument("--experts-hidden", type=int, default=96)
    p.add_argument("--context", type=int, default=512)
    p.add_argument("--batch", type=int, default=32)
    p.add_argument("--steps", type=int, default=1500)
    p.add_argument("--stop", type=int, help="stop at this step of them")
    p.add_argument("--eval-every", type=int, default=50)
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--weight-decay", type=float, default=0.1)
    p.add_argument("--dropout", type=float, default=0.25)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return p.parse_args()


def tokenizer_of(text, vocab):
    """Byte-level BPE: any text has tokens. `<|end|>` ends a text, which the one that is trained on never does."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    return tokenizer


def config_of(args):
    """A small DeepSeek-V3: low-rank queries, YaRN, a dense layer, then sigmoid-gated experts in groups."""
    return DeepseekV3Config(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 5 // 2,
        moe_intermediate_size=args.experts_hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        n_shared_experts=1,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=1.5,
        norm_topk_prob=True,
        first_k_dense_replace=1,
        q_lora_rank=128,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=32,
        v_head_dim=32,
        max_position_embeddings=1024,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 256,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        tie_word_embeddings=True,
        num_mtp_layers=0,
        bos_token_id=None,
        eos_token_id=0,
        use_cache=False,
    )


def add_dropout(model, p):
    """Dropout on the embedding and on each block's output: the class has it for attention weights only."""
    drop = lambda x: torch.nn.functional.dropout(x, p, model.training)
    model.model.embed_tokens.register_forward_hook(lambda m, i, out: drop(out))
    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(lambda m, i, out: (drop(out[0]), *out[1:]))
        layer.mlp.register_forward_hook(lambda m, i, out: drop(out))


def balance_experts(model, rate=1e-3):
    """DeepSeek-V3's loss-free balancing: the bias of an expert with too few tokens rises."""

    def after(gate, _, out):
        if gate.training:
            load = torch.bincount(out[2].flatten(), minlength=gate.num_experts).float()
            gate.e_score_correction_bias += rate * torch.sign(load.mean() - load)

    for layer in model.model.layers:
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.register_forward_hook(after)


def windows(ids, length):
    count = (len(ids) - 1) // length
    return ids[: count * length].view(count, length), ids[1 : count * length + 1].view(count, length)


@torch.no_grad()
def loss_of(model, ids, length, autocast):
    model.eval()
    total, count = 0.0, 0
    for x, y in zip(*(t.split(32) for t in windows(ids, length))):
        with autocast():
            logits = model(x).logits
        total += torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), y.flatten(), reduction="sum").item()
        count += y.numel()
    model.train()
    return total / count


def train(args, model, ids, held_out):
    device = args.device
    autocast = lambda: torch.autocast(device_type=torch.device(device).type, dtype=torch.bfloat16)
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": args.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95))
    warmup = min(100, args.steps // 4 + 1)

    def rate(step):
        if step < warmup:
            return (step + 1) / warmup
        return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, args.steps - warmup)))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    pick = torch.Generator().manual_seed(args.seed)
    span = torch.arange(args.context + 1, device=device)
    log, best, best_state = [], math.inf, None
    begin = time.time()
    for step in range(1, args.steps + 1):
        starts = torch.randint(0, len(ids) - args.context - 1, (args.batch, 1), generator=pick).to(device)
        rows = ids[starts + span]
        with autocast():
            logits = model(rows[:, :-1]).logits
            loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        if step % args.eval_every == 0 or step == args.steps:
            held = loss_of(model, held_out, args.context, autocast)
            log.append({"step": step, "train": round(loss.item(), 4), "held_out": round(held, 4)})
            print(f"step {step:5} train {loss.item():.4f} held out {held:.4f} {time.time() - begin:6.1f} s", flush=True)
            if held < best:
                best, best_step = held, step
                best_state = {k: v.detach().clone() for k, v in model.state_dict().items()}
            if step == args.stop:
                break
    model.load_state_dict(best_state)
    return {"best_step": best_step, "held_out_loss": best, "seconds": round(time.time() - begin, 1), "log": log}


def save(model, tokenizer, out, about):
    """Weights as f16; the routers' bias stays f32, as DeepSeek ships it."""
    for parameter in model.parameters():
        parameter.data = parameter.data.half()
    model.config.dtype = torch.float16
    model.config.use_cache = True
    model.save_pretrained(out)
    (out / "generation_config.json").unlink(missing_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    (out / "training.json").write_text(json.dumps(about, indent=1) + "\n")


def main():
    args = parse()
    torch.manual_seed(args.seed)
    torch.use_deterministic_algorithms(True, warn_only=True)
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    text, held_text = Path(args.text).read_text(), Path(args.held_out).read_text()
    tokenizer = tokenizer_of(text, args.vocab)
    as_ids = lambda t: torch.tensor(tokenizer.encode(t).ids, device=args.device)
    ids, held_out = as_ids(text), as_ids(held_text)

    model = DeepseekV3ForCausalLM._from_config(config_of(args), attn_implementation="sdpa").to(args.device)
    add_dropout(model, args.dropout)
    balance_experts(model)
    model.train()
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters} parameters, {len(ids)} training tokens, {len(held_out)} held out", flush=True)
    result = train(args, model, ids, held_out)
    device = torch.cuda.get_device_name() if args.device.startswith("cuda") else "CPU"
    about = {
        "arguments": {k: v for k, v in vars(args).items() if k not in ("text", "held_out", "out", "device")},
        "parameters": parameters,
        "training_tokens": len(ids),
        "held_out_tokens": len(held_out),
        "device": device,
        **result,
    }
    save(model, tokenizer, out, about)
    print(f"held out {result['held_out_loss']:.4f} a token at step {result['best_step']}")


if __name__ == "__main__":
    main()
