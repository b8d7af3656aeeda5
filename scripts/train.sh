#!/usr/bin/env bash
# Makes the checkpoint of examples/generate and its tests' goldens: trains transformers' own DeepseekV3 class on the text in
# examples/generate/data, then saves what transformers computes with it and with tiny random models. Needs python3 with torch 2.11,
# transformers 5.17, tokenizers 0.23 and safetensors 0.8, and for `sparse`, `models` and `chat` transformers 5.24; an H200 trains it in two minutes,
# a CPU in hours.
#
#   scripts/train.sh            all of it
#   scripts/train.sh goldens    what transformers computes, with the checkpoint as it is
#   scripts/train.sh tiny       the tiny models and what transformers computes with them
#   scripts/train.sh sparse     those whose attention is sparse, and what transformers computes with them
#   scripts/train.sh models     those of other types with DeepSeek's attention, and what transformers computes with them
#   scripts/train.sh vocabularies  files that checkpoints have instead of tokenizer.json, and ids of texts (tiktoken, sentencepiece, protobuf)
#   scripts/train.sh chat       what transformers makes of the chat templates in tests/chat
#
# PYTHON: which python3. Seeds are fixed, but a card's sums are not: another run is another checkpoint, about as good.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
here=examples/generate
export TRANSFORMERS_VERBOSITY=error HF_HUB_OFFLINE=1 PYTHONDONTWRITEBYTECODE=1

train() {
    # It is best at step 1000: the held-out loss rises again from there.
    "$python" scripts/train/train.py --text $here/data/train.txt --held-out $here/data/held_out.txt --out $here/model \
        --lr 1e-3 --dropout 0.25 --steps 1500 --stop 1100 --seed 1
}
goldens() {
    "$python" scripts/train/goldens.py --model $here/model --text $here/data/train.txt --held-out $here/data/held_out.txt \
        --prompt "$(head -n 4 $here/data/held_out.txt)" --out $here/tests/goldens
}
tiny() { "$python" scripts/train/tiny.py --out $here/tests/tiny; }
sparse() { "$python" -W ignore::FutureWarning scripts/train/sparse.py --out $here/tests/tiny; }
chat() { "$python" scripts/train/chat.py --out $here/tests/chat; }
vocabularies() {
    for made in vocabularies gguf_vocabulary; do
        "$python" scripts/train/$made.py --text $here/data/train.txt --out $here/tests/vocabularies
    done
}
models() { "$python" -W ignore::FutureWarning scripts/train/models.py --out $here/tests/tiny; }

case ${1:-all} in
    all) train && goldens && tiny && sparse && models && chat && vocabularies ;;
    goldens | tiny | sparse | models | chat | vocabularies) "$1" ;;
    *) sed -n '2,/^set/{/^#/p}' "$0" >&2 && exit 2 ;;
esac
chmod 644 $here/model/* $here/tests/goldens/* $here/tests/tiny/*/* $here/tests/chat/* $here/tests/vocabularies/*/*
