"""Compares the ids of an imported model with llama.cpp's, on texts of our environments and corpora.

llama.cpp is compiled when it is installed, so it has an environment of its own, and the texts go through a file:

    python tests/tools/llama_cpp_ids.py write MODEL_FOLDER TEXTS.jsonl [FILE_OF_LINES ...]
    OTHER_ENVIRONMENT/bin/python tests/tools/llama_cpp_ids.py compare FILE.gguf TEXTS.jsonl

`write` plays the three embedded environments by their experts and takes every observation, instruction and page, then
every line of the files, each with the ids of the model's tokenizer. `compare` needs the package `llama-cpp-python`.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path

ENVIRONMENTS = ("turngym/ALFWorld-v0", "turngym/WebShop-v0", "turngym/Search-v0")


def texts(lines: list[Path]) -> Iterator[str]:
    import gymnasium as gym

    import turngym.envs  # noqa: F401 - registers them

    for name in ENVIRONMENTS:
        env = gym.make(name)
        for seed in range(60):
            observation, info = env.reset(seed=seed)
            yield str(observation)
            for _ in range(12):
                actions = info.get("admissible_actions") or ["look"]
                yield from map(str, actions)
                observation, _, ended, cut, info = env.step(actions[seed % len(actions)])
                yield str(observation)
                if ended or cut:
                    break
    for path in lines:
        with path.open(encoding="utf-8") as file:
            yield from itertools.islice(file, 20_000)


def write(folder: str, out: str, lines: list[str]) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    known = dict.fromkeys(text for text in texts([Path(line) for line in lines]) if text)
    with Path(out).open("w", encoding="utf-8") as file:
        for text in known:
            file.write(json.dumps({"text": text, "ids": tokenizer(text).input_ids}) + "\n")
    print(f"{len(known)} texts")


def compare(gguf: str, file: str) -> int:
    from llama_cpp import Llama

    model = Llama(gguf, vocab_only=True, verbose=False)
    count, tokens, other = 0, 0, list[str]()
    for line in Path(file).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        ids = model.tokenize(row["text"].encode(), add_bos=False, special=True)
        count, tokens = count + 1, tokens + len(ids)
        if ids != row["ids"]:
            other.append(row["text"])
    for text in other[:10]:
        print(f"differs: {text!r:.200}")
    print(f"{count} texts, {tokens} tokens: {len(other)} texts differ")
    return int(bool(other))


if __name__ == "__main__":
    if sys.argv[1:2] == ["write"]:
        write(sys.argv[2], sys.argv[3], sys.argv[4:])
    else:
        sys.exit(compare(sys.argv[2], sys.argv[3]))
