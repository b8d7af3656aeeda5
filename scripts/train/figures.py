"""The figures of examples/generate/README.md: makes a checkpoint of Youtu-LLM-2B's dims with random bf16 weights and few layers, and measures
what the program takes for it: memory, prefill and decode, in seconds of the clock and of processors. The latter count where others have a part
of the machine. Nothing is downloaded.

    cargo build --release -p generate
    python3 scripts/train/figures.py make --out /tmp/youtu            # 844 MB at 3 layers; needs numpy
    python3 scripts/train/figures.py run --model /tmp/youtu           # or a GGUF file with --tokenizer; needs nothing
    python3 scripts/train/figures.py gguf --model /tmp/youtu --type Q8_0 --out /tmp/youtu-q8.gguf   # needs numpy
"""

import argparse
import json
import os
import re
import struct
import subprocess
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parents[2]
SMALL = HERE / "examples/generate/model"
HIDDEN, HEADS, Q, L, R, P, V, INNER, VOCAB = 2048, 16, 1536, 512, 64, 128, 128, 6144, 128256


def tensors(layers):
    yield "model.embed_tokens.weight", (VOCAB, HIDDEN)
    for i in range(layers):
        layer, attention = f"model.layers.{i}", f"model.layers.{i}.self_attn"
        yield f"{layer}.input_layernorm.weight", (HIDDEN,)
        yield f"{layer}.post_attention_layernorm.weight", (HIDDEN,)
        yield f"{attention}.q_a_proj.weight", (Q, HIDDEN)
        yield f"{attention}.q_a_layernorm.weight", (Q,)
        yield f"{attention}.q_b_proj.weight", (HEADS * (P + R), Q)
        yield f"{attention}.kv_a_proj_with_mqa.weight", (L + R, HIDDEN)
        yield f"{attention}.kv_a_layernorm.weight", (L,)
        yield f"{attention}.kv_b_proj.weight", (HEADS * (P + V), L)
        yield f"{attention}.o_proj.weight", (HIDDEN, HEADS * V)
        yield f"{layer}.mlp.gate_proj.weight", (INNER, HIDDEN)
        yield f"{layer}.mlp.up_proj.weight", (INNER, HIDDEN)
        yield f"{layer}.mlp.down_proj.weight", (HIDDEN, INNER)
    yield "model.norm.weight", (HIDDEN,)


def make(args):
    import numpy as np

    args.out.mkdir(parents=True, exist_ok=True)
    config = dict(
        model_type="youtu", hidden_size=HIDDEN, num_hidden_layers=args.layers, num_attention_heads=HEADS, num_key_value_heads=HEADS,
        q_lora_rank=Q, kv_lora_rank=L, qk_rope_head_dim=R, qk_nope_head_dim=P, v_head_dim=V, intermediate_size=INNER, vocab_size=VOCAB,
        tie_word_embeddings=True, rms_norm_eps=1e-6, max_position_embeddings=131072, rope_interleave=True, attention_bias=False,
        mlp_bias=False, hidden_act="silu", bos_token_id=128000, eos_token_id=128001, rope_parameters=dict(rope_type="default", rope_theta=1.6e6))
    (args.out / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    (args.out / "tokenizer.json").write_bytes((SMALL / "tokenizer.json").read_bytes())
    header, at = {}, 0
    for name, shape in tensors(args.layers):
        count = int(np.prod(shape))
        header[name] = dict(dtype="BF16", shape=list(shape), data_offsets=[at, at + count * 2])
        at += count * 2
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    rng = np.random.default_rng(1)
    with open(args.out / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, shape in tensors(args.layers):
            for begin in range(0, int(np.prod(shape)), 1 << 24):
                count = min(1 << 24, int(np.prod(shape)) - begin)
                values = np.ones(count, np.float32) if len(shape) == 1 else rng.standard_normal(count, np.float32) * np.float32(0.02)
                (values.view(np.uint32) >> 16).astype(np.uint16).tofile(file)


def once(command):
    """Seconds of processors, most memory, and what it told."""
    with tempfile.TemporaryFile("w+") as told:
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=told)
        _, status, usage = os.wait4(child.pid, 0)
        told.seek(0)
        text = told.read()
    assert status == 0, text
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024, text


def rate(text, what):
    return float(re.search(rf"{what}: .*?, ([0-9.]+) tokens/s", text).group(1))


def run(args):
    base = [args.program, "-m", str(args.model), "--backend", "cpu", "-t", "0", *args.more]
    prompt = tempfile.NamedTemporaryFile("w", suffix=".txt")
    prompt.write((HERE / "examples/generate/data/train.txt").read_text()[: args.characters])
    prompt.flush()
    size = args.model.stat().st_size if args.model.is_file() else sum(it.stat().st_size for it in args.model.glob("*.safetensors"))
    best = dict(prefill=0.0, cpu=0.0, decode=0.0)
    for _ in range(args.times):
        short, memory, text = once([*base, "-p", "a", "-n", str(args.tokens)])
        best["decode"] = max(best["decode"], rate(text, "decode"))
        idle, _, _ = once([*base, "-p", "a", "-n", "1"])
        all_of_it, most, text = once([*base, "-f", prompt.name, "-n", "1"])
        tokens = int(re.search(r"prefill: (\d+) tokens", text).group(1))
        best["prefill"] = max(best["prefill"], rate(text, "prefill"))
        best["cpu"] = max(best["cpu"], tokens / (all_of_it - idle))
        best["decode cpu"] = min(best.get("decode cpu", 1e9), (short - idle) / (args.tokens - 1) * 1000)
    print(f"resident memory over the file's bytes: {memory / size:.2f} after {args.tokens} tokens, {most / size:.2f} after a prompt of {tokens}")
    print(f"decode: {1000 / best['decode']:.0f} ms a token, {best['decode cpu']:.0f} ms of processors")
    print(f"prefill of {tokens} tokens: {best['prefill']:.0f} tokens a second, {best['cpu']:.0f} a second of processors")


def gguf(args):
    """The same weights as a file of llama.cpp's form: matrices in one type, norms in f32. Blocks of Q8_0 and Q4_0 as ggml rounds them."""
    import numpy as np

    kinds = {"Q4_0": 2, "Q8_0": 8, "BF16": 30}
    raw = np.memmap(args.model / "model.safetensors", np.uint8, "r")
    length = int(raw[:8].view(np.uint64)[0])
    header = json.loads(bytes(raw[8 : 8 + length]))
    layers = json.loads((args.model / "config.json").read_text())["num_hidden_layers"]

    def values(name):
        begin, end = header[name]["data_offsets"]
        words = np.frombuffer(raw[8 + length + begin : 8 + length + end].tobytes(), np.uint16)
        return (words.astype(np.uint32) << 16).view(np.float32).reshape(header[name]["shape"])

    def blocks(x):
        if args.type == "BF16":
            return (x.view(np.uint32) >> 16).astype(np.uint16).tobytes()
        x = x.reshape(-1, 32)
        if args.type == "Q8_0":
            scale = np.abs(x).max(1, keepdims=True) / 127
            codes = np.round(x / np.where(scale == 0, 1, scale)).astype(np.int8)
            return np.concatenate([scale.astype(np.float16).view(np.uint8).reshape(-1, 2), codes.view(np.uint8)], 1).tobytes()
        largest = np.take_along_axis(x, np.abs(x).argmax(1)[:, None], 1)
        scale = largest / -8
        codes = np.clip(x / np.where(scale == 0, 1, scale) + 8.5, 0, 15).astype(np.uint8)
        return np.concatenate([scale.astype(np.float16).view(np.uint8).reshape(-1, 2), codes[:, :16] | codes[:, 16:] << 4], 1).tobytes()

    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "model.layers.": "blk.", "input_layernorm": "attn_norm",
             "post_attention_layernorm": "ffn_norm", "self_attn.q_a_proj": "attn_q_a", "self_attn.q_a_layernorm": "attn_q_a_norm",
             "self_attn.q_b_proj": "attn_q_b", "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.kv_a_layernorm": "attn_kv_a_norm",
             "self_attn.kv_b_proj": "attn_kv_b", "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
             "mlp.down_proj": "ffn_down"}
    text = lambda it: struct.pack("<Q", len(it.encode())) + it.encode()
    number = lambda name, value: text("deepseek2." + name) + struct.pack("<II", 4, value)
    real = lambda name, value: text("deepseek2." + name) + struct.pack("<If", 6, value)
    keys = [text("general.architecture") + struct.pack("<I", 8) + text("deepseek2"), number("block_count", layers),
            number("embedding_length", HIDDEN), number("feed_forward_length", INNER), number("attention.head_count", HEADS),
            number("attention.head_count_kv", 1), number("attention.q_lora_rank", Q), number("attention.kv_lora_rank", L),
            number("attention.key_length", L + R), number("attention.value_length", L), number("attention.key_length_mla", P + R),
            number("attention.value_length_mla", V), number("rope.dimension_count", R), real("rope.freq_base", 1.6e6),
            number("context_length", 131072), number("vocab_size", VOCAB), number("leading_dense_block_count", layers),
            real("attention.layer_norm_rms_epsilon", 1e-6)]
    infos, at, order = b"", 0, []
    for name, shape in tensors(layers):
        new = name.removesuffix(".weight")
        for old, theirs in sorted(names.items(), key=lambda it: -len(it[0])):
            new = new.replace(old, theirs)
        kind, data = (0, values(name).astype(np.float32).tobytes()) if len(shape) == 1 else (kinds[args.type], blocks(values(name)))
        infos += text(new + ".weight") + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *reversed(shape)) + struct.pack("<IQ", kind, at)
        order.append(data + bytes(-len(data) % 32))
        at += len(order[-1])
    head = b"GGUF" + struct.pack("<IQQ", 3, len(order), len(keys)) + b"".join(keys) + infos
    args.out.write_bytes(head + bytes(-len(head) % 32) + b"".join(order))


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sub = p.add_subparsers(required=True)
    for name, what in [("make", make), ("run", run), ("gguf", gguf)]:
        one = sub.add_parser(name)
        one.set_defaults(what=what)
        if name in ("make", "gguf"):
            one.add_argument("--out", required=True, type=Path)
        if name == "make":
            one.add_argument("--layers", type=int, default=3)
        else:
            one.add_argument("--model", required=True, type=Path)
            one.add_argument("--times", type=int, default=3)
        if name == "gguf":
            one.add_argument("--type", choices=["Q4_0", "Q8_0", "BF16"], required=True)
        if name == "run":
            one.add_argument("--program", default=str(HERE / "target/release/generate"))
            one.add_argument("--tokens", type=int, default=24)
            one.add_argument("--characters", type=int, default=1180)
            one.add_argument("more", nargs="*")
    args = p.parse_args()
    args.what(args)


if __name__ == "__main__":
    main()
