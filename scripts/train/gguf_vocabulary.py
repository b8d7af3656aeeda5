"""Makes what the tests of GGUF's tokenizers compare with: a tiny vocabulary of bytes whose merges go over every boundary, the ids that the
library `tokenizers` gives texts with each model's pre-tokenizer in the form of tokenizer.json, and the pieces of the tiny SentencePiece
model with its ids, of the texts that vocabularies.py has. Nothing is downloaded.

    python3 scripts/train/gguf_vocabulary.py --text examples/generate/data/train.txt --out examples/generate/tests/vocabularies

Needs tokenizers 0.23 and sentencepiece.
"""

import argparse
import json
import struct
import unicodedata
from pathlib import Path

import sentencepiece
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

# DeepSeek-V3's is that of its published tokenizer.json, letter by letter.
V3 = [r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
      "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"]
GLM = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LOWER, UPPER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
ENDS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
START = r"[^\r\n\p{L}\p{N}]?"
TEKKEN = rf"{START}{UPPER}*{LOWER}+|{START}{UPPER}+{LOWER}*|\p{{N}}{REST}"
YOUTU = ["[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+|[\u3105-\u312f]+|"
         "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", rf"{START}{UPPER}*{LOWER}+{ENDS}|{START}{UPPER}+{LOWER}*{ENDS}|\p{{N}}{REST}"]
WORD = rf"{START}[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]*[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]+{ENDS}"
CAPITALS = rf"{START}[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]+[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]*{ENDS}"
KIMI = "|".join([r"[\p{Han}]+", WORD, CAPITALS, r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"])
# Letters with a case, those of newer Unicode left out.
NEWER = [(0x560, 0x588), (0x10C7, 0x10CD), (0x10D0, 0x10FF), (0x1C80, 0x1C88), (0x2D00, 0x2D2D), (0xA790, 0xA7FA), (0xAB30, 0xAB68), (0x10570, 0x105BC),
         (0x16E40, 0x16E7F), (0x1D400, 0x1DFFF), (0x10C89, 0x10CBF), (0x10D50, 0x10D85)]
CASED = "".join(f"\\x{{{c:X}}}" for c in range(0x110000) if unicodedata.category(chr(c)) in ("Lu", "Ll", "Lt") and not any(a <= c <= b for a, b in NEWER))
LLM = [r"[\r\n]", rf"\s?[{CASED}]+", "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+", r"\s+$",
       "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}+"]
SPLITS = {"deepseek-llm": LLM, "deepseek-v3": V3, "kimi-k2": [KIMI], "glm4": [GLM], "youtu": YOUTU, "tekken": [TEKKEN], "llama-bpe": [GLM]}
IGNORE = {"youtu", "tekken", "llama-bpe"}
MORE = ["\u4f60\u597d\u4e16\u754c hello\u4f60\u597dWORLD", "12345 6789 3.14", "I'm you'Re WE'LL", "fn main() {\n    x += 1;\n}\n\n\n", "a  b   c ", "!!!\n\nab", "(abc) .def/ghi"] * 60
TEXTS = ["", " ", "  two  spaces ", "KING HENRY:\nWhat news, my lord?", "It's 12345.67 o'clock; I'LL go!!\n\n\nNow", "\u4f60\u597d\u4e16\u754c, na\u00efve caf\u00e9",
         "\U0001f600\U0001f3fd \u0645\u0631\u062d\u0628\u0627 \u0928\u092e\u0938\u094d\u0924\u0947", "tab\there\r\nand \t there", "\ufb01ne \uff21\uff22\uff23 \u2460",
         "hello\u4f60\u597dWORLDhelloWorld", "e\u0301 \u1e9b\u0323", "a\u00a0b\u3000c", "\x00\x07 odd", "<|im_end|>[BOS]and <|end|>", "1234567 \u0661\u0662\u0663 a1b2",
         "\ud55c\uad6d\uc5b4 \u3131\u3132\uff01\uff1a\u201cx\u201d\u2026 \u3105\u3106", "path/to/x.rs // note\n/", "!!!\n\nab (abc) .def/ghi_jkl", "\u03a9\u2126\u212aK \u1fbe\u1f7d\u03ce \u1fd3",
         "x  \n  y   \n\n z  ", "\u01c5ungla \u00aa\u00ba \u02b0 \u0560", "\u3042\u30a2 \u30fb\u0800", "WORDS and Words'S can't DON'T 'tis", "$100+5=\u20ac1\u00d72 ^_^ `a` ~"]

# What llama.cpp publishes ids of, for each of its vocabularies.
PUBLISHED = ["ied 4 \xbd months", "\xc4pfel", "  ", "\t", "\n", "\n\n", "\t\n", "Hello world", " Hello world", " Hello World!",
             "Hello, world!", " this is \U0001f999.cpp", "w048 7tuijk dsdfhu",
             "\u043d\u0435\u0449\u043e \u043d\u0430 \u0411\u044a\u043b\u0433\u0430\u0440\u0441\u043a\u0438",
             "\u1780\u17b6\u1793\u17cb\u178f\u17c2\u1796\u17b7\u179f\u17c1\u179f\u17a2\u17b6\u1785\u1781\u179b\u1785\u17c1\u1789",
             "\U0001f680 (normal) \U0001f636\u200d\U0001f32b\ufe0f (multiple emojis concatenated) \u2705 (only emoji"
             " that has its own token)", " Hello", "  Hello", "   Hello", "    Hello", "    Hello\n    Hello", " (", "\n =", "' era",
             "Hello, y'all! How are you \U0001f601 ?\u6211\u60f3\u5728apple\u5de5\u4f5c1314151\u5929\uff5e", "!!!!!!", "3", "333",
             "333333333", "C\u1eeda Vi\u1ec7t", " discards",
             "\n \n\n \n\n\n \t \t\t \t\n  \n   \n    \n     \n\U0001f680 (normal) \U0001f636\u200d\U0001f32b\ufe0f (multiple "
             "emojis concatenated) \u2705 \U0001f999\U0001f999 3 33 333 3333 33333 333333 3333333"
             " 33333333 3.3 3..3 3...3 \u1780\u17b6\u1793\u17cb\u178f\u17c2\u1796\u17b7\u179f\u17c1\u179f\u17a2\u17b6\u1785\U0001f601 ?\u6211\u60f3\u5728apple\u5de5\u4f5c1314151\u5929"
             "\uff5e ------======= \u043d\u0435\u0449\u043e \u043d\u0430 \u0411\u044a\u043b\u0433\u0430\u0440\u0441\u043a\u0438 ''''''```````\"\"\"\"......!!!"
             "!!!?????? I've been 'told he's there, 'RE you sure? 'M not s" "ure I'll make it, 'D you like some tea? We'Ve a'lL"]


def parse(message):
    fields, at = [], 0

    def number():
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at, value, shift = at + 1, value | (byte & 127) << shift, shift + 7
            if byte < 128:
                return value

    while at < len(message):
        key = number()
        if key & 7 == 0:
            fields.append((key >> 3, number()))
        else:
            size = number() if key & 7 == 2 else 4 if key & 7 == 5 else 8
            fields.append((key >> 3, message[at : at + size]))
            at += size
    return fields


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--text", required=True, type=Path)
    p.add_argument("--out", required=True, type=Path)
    args = p.parse_args()
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(vocab_size=1000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), max_token_length=10, show_progress=False)
    bpe.train_from_iterator(args.text.read_text()[:40000].split("\n\n") + MORE + TEXTS * 200, trainer)
    model = json.loads(bpe.to_str())["model"]
    tokens = [token for token, _ in sorted(model["vocab"].items(), key=lambda it: it[1])]
    special = ["[BOS]", "<|im_end|>", "<|end|>"]
    ids = {}
    for pre, splits in SPLITS.items():
        tokenizer = Tokenizer(models.BPE(vocab=model["vocab"], merges=[tuple(pair) for pair in model["merges"]], ignore_merges=pre in IGNORE))
        steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in splits]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
        ids[pre] = [tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS + PUBLISHED]
    # Llama 3 splits as GLM-4 does.
    equal = {(a, b) for a in ids for b in ids if a < b and ids[a] == ids[b]}
    assert equal <= {("glm4", "llama-bpe")}, equal
    pieces = []
    for field, value in parse((args.out / "bpe/tokenizer.model").read_bytes()):
        if field == 1:
            piece = dict(parse(value))
            pieces.append([piece[1].decode(), struct.unpack("<f", piece.get(2, bytes(4)))[0], piece.get(3, 1)])
    processor = sentencepiece.SentencePieceProcessor(model_file=str(args.out / "bpe/tokenizer.model"))
    # Control tokens are no text for SentencePiece.
    of_pieces = json.loads((args.out / "goldens.json").read_text())["texts"]
    piece_ids = [None if "<s>" in text else processor.encode(text) for text in of_pieces]
    made = {"texts": TEXTS + PUBLISHED, "tokens": tokens + special, "merges": [" ".join(pair) for pair in model["merges"]], "ids": ids, "pieces": pieces, "piece_ids": piece_ids}
    (args.out / "gguf.json").write_text(json.dumps(made) + "\n")


if __name__ == "__main__":
    main()
