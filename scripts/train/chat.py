"""Writes what transformers makes of chat templates: for each template of the folder and each conversation the text, or the error.

    python3 scripts/train/chat.py --out examples/generate/tests/chat

Templates are written by hand in the manner of those that models are released with. No file is downloaded.
"""

import argparse
import json
from pathlib import Path

from jinja2.exceptions import TemplateError
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

SPECIAL = {"bos_token": "<bos>", "eos_token": "<eos>"}


def turn(role, content, **more):
    return {"role": role, "content": content, **more}


def user(content, **more):
    return turn("user", content, **more)


def assistant(content, **more):
    return turn("assistant", content, **more)


TOOL = {"type": "function", "function": {"name": "weather", "description": "Says \"how\" it is <outside>.", "parameters": {
    "type": "object", "required": ["where"], "properties": {"where": {"type": "string", "default": None}, "days": {"maximum": 1.5}}}}}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"where": "Z\u00fcrich", "days": 2, "units": ["C", 0.5, True]}}}
CONVERSATIONS = [
    dict(messages=[user("Hello, who are you?")]),
    dict(messages=[turn("system", "You are terse.\tVery."), user("Hi")]),
    dict(messages=[user("2 + 2?"), assistant("4"), user("And doubled?\n\nIn words.")]),
    dict(messages=[turn("system", " Two\nlines "), user("a"), assistant(" b\n\nc "), user("d"), assistant("e"), user("f")]),
    dict(messages=[user("x"), assistant("<think>\nI add.\n</think>\n\nIt is 4."), user("sure?")]),
    dict(messages=[user("x"), assistant("<think>first</think>one</think> two"), user("y")], enable_thinking=False),
    dict(messages=[user("na\u00efve \u4f60\u597d \U0001f600 <&>'\"")], enable_thinking=True),
    dict(messages=[user("a"), user("b")]),
    dict(messages=[user("Weather?"), assistant("I look.", tool_calls=[CALL, CALL]), turn("tool", "sunny"), turn("tool", "rain")],
         tools=[TOOL], clear_thinking=False),
    dict(messages=[user("a"), assistant("   "), user("b /nothink"), assistant("an answer to go on from")], add_generation_prompt=False),
    dict(messages=[turn("system", ""), user("")], enable_thinking=False),
    dict(messages=[user("a"), assistant("r", reasoning_content="because"), user("b"), assistant("s", reasoning_content="so")], tools=[]),
]


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", required=True, type=Path)
    args = p.parse_args()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}, "a")), **SPECIAL)
    goldens = {}
    for path in sorted(args.out.glob("*.jinja")):
        template, of_template = path.read_text(), []
        for conversation in CONVERSATIONS:
            variables = {"tools": None, "documents": None, "add_generation_prompt": True, **conversation}
            given = {name: value for name, value in variables.items() if name != "messages"}
            try:
                text = tokenizer.apply_chat_template(conversation["messages"], chat_template=template, tokenize=False, **given)
                of_template.append({"text": text})
            except TemplateError as error:
                of_template.append({"error": str(error)})
        goldens[path.stem] = of_template
    written = {"special": SPECIAL, "conversations": [{"tools": None, "documents": None, "add_generation_prompt": True, **it}
                                                     for it in CONVERSATIONS], "goldens": goldens}
    (args.out / "goldens.json").write_text(json.dumps(written, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
