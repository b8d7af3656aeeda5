"""Makes tiny vocabularies in the files that models have instead of tokenizer.json, and the ids of some texts by transformers, or by
the libraries that made these formats, tiktoken and SentencePiece. Nothing is downloaded.

    python3 scripts/train/vocabularies.py --text examples/generate/data/train.txt --out examples/generate/tests/vocabularies

Needs tiktoken, sentencepiece, protobuf and transformers 5.24.
"""

import argparse
import base64
import io
import json
from pathlib import Path

import sentencepiece
import tiktoken
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

WORD = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
CAPITALS = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join([r"[\p{Han}]+", WORD, CAPITALS, r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"])
MORE = ["\u4f60\u597d\u4e16\u754c hello\u4f60\u597dWORLD", "12345 6789 3.14", "I'm you'Re WE'LL", "fn main() {\n    x += 1;\n}\n\n\n", "a  b   c "] * 40
TEXTS = ["", " ", "  two  spaces ", "KING HENRY:\nWhat news, my lord?", "It's 12345.67 o'clock; I'LL go!!\n\n\nNow", "\u4f60\u597d\u4e16\u754c, na\u00efve caf\u00e9",
         "\U0001f600\U0001f3fd \u0645\u0631\u062d\u0628\u0627 \u0928\u092e\u0938\u094d\u0924\u0947", "tab\there\r\nand \t there", "\ufb01ne \uff21\uff22\uff23 \u2460",
         "x" * 30, "hello\u4f60\u597dWORLDhelloWorld", "\u2581 is written", "e\u0301 \u1e9b\u0323", "a\u00a0b\u3000c", "\x00\x07 odd", "<s>in text</s><unk>",
         "<|im_end|>[BOS]and <|reserved_token_999|>"]
NAMED = {0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 9: "<|im_user|>"}


def ranks_file(path, lines):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(PATTERN), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False))
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    byte_of = {chr(byte): byte for byte in printed}
    byte_of |= {chr(0x100 + i): byte for i, byte in enumerate(b for b in range(256) if b not in printed)}
    vocab = sorted(tokenizer.get_vocab().items(), key=lambda it: it[1])
    ranks = {bytes(byte_of[c] for c in token): rank for token, rank in vocab}
    path.mkdir(parents=True, exist_ok=True)
    (path / "tiktoken.model").write_text("".join(f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items()))
    special = {NAMED.get(i, f"<|reserved_token_{len(ranks) + i}|>"): len(ranks) + i for i in range(256)}
    added = {str(special[name]): {"content": name, "special": True} for name in NAMED.values()}
    config = {"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": added, "bos_token": "[BOS]", "eos_token": "[EOS]"}
    (path / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
    encoding = tiktoken.Encoding("tiny", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special)
    return [encoding.encode(text, allowed_special="all") for text in TEXTS]


def pieces_file(path, lines, of=None, **options):
    path.mkdir(parents=True, exist_ok=True)
    made = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(lines), model_writer=made, num_threads=1, minloglevel=2, **options)
    (path / "tokenizer.model").write_bytes(made.getvalue())
    if of:
        # transformers adds no space before a text that begins with one.
        (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": of}) + "\n")
        tokenizer = AutoTokenizer.from_pretrained(path)
        return [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]
    processor = sentencepiece.SentencePieceProcessor(model_proto=made.getvalue())
    # Control tokens are no text for SentencePiece, and are for transformers.
    return [None if "<s>" in text else processor.encode(text) for text in TEXTS]


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--text", required=True, type=Path)
    p.add_argument("--out", required=True, type=Path)
    args = p.parse_args()
    lines = args.text.read_text()[:120000].split("\n") + MORE
    # Llama's and MiniCPM's options.
    llama = dict(model_type="bpe", vocab_size=600, byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
                 allow_whitespace_only_pieces=True, split_digits=True)
    ids = {
        "tiktoken": ranks_file(args.out / "tiktoken", lines),
        "bpe": pieces_file(args.out / "bpe", lines, of="LlamaTokenizer", **llama),
        "unigram": pieces_file(args.out / "unigram", lines, model_type="unigram", vocab_size=600, byte_fallback=True,
                               normalization_rule_name="identity", remove_extra_whitespaces=False, add_dummy_prefix=False),
    }
    (args.out / "goldens.json").write_text(json.dumps({"texts": TEXTS, "ids": ids}) + "\n")


if __name__ == "__main__":
    main()
