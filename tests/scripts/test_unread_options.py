"""An option that nothing would read without another one is refused, by every verb."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from turngym.scripts import main as command
from turngym.scripts import options, serve_proxy
from turngym.trainers import distributed


class Seen(BaseException):
    """A verb has read its options. Not an Exception, so that no verb catches it."""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("serve proxy --student s --out o --no-train --judge expert", "no option --judge"),
        ("serve proxy --student s --out o --prm-opd.w-hint 2", "no option --prm-opd.w-hint"),
        ("train opd --student s --out o --lora.alpha 8", "lora.rank must be given"),
    ],
)
def test_each_verb_says_so_before_anything_is_opened(
    words: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command.main(words.split()) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert said in lines[0]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("eval --token-ids", "token_ids is a setting of agent = openai or own; agent is player"),
        ("eval --agent random --noise .2", "noise is a setting of agent = player or own; agent is random"),
        ("eval --agent openai:m --examples.form text", "examples must be given"),
        ("eval --agent model:x --policy-server http://127.0.0.1:1 --threads 2", "threads is a setting"),
    ],
)
def test_settings_of_another_kind_are_refused_by_type(
    words: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    verb, *more = words.split()
    panel = ["--panel", "alfworld-quickstart"] if verb == "eval" else []
    assert command.main([verb, *panel, *more]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
    assert not list(tmp_path.iterdir())


ROWS = [
    # an option, the command, what makes it one that something reads
    ("--data x", "serve webshop", "--profile 1k-human"),
    ("--host x", "serve mcp --panel p --out o --transport stdio", "--transport http"),
    ("--clients 3", "serve mcp --panel p --out o", "--transport http"),
    ("--idle 3", "serve mcp --panel p --out o", "--transport http"),
    ("--client-keys x", "serve mcp --panel p --out o", "--transport http"),
    ("--rerank-depth 5", "serve retrieval --index x", "--rerank coverage"),
    ("--encoder hf:x", "serve retrieval --index bm25:x", "--index x"),
    ("--device cuda", "serve retrieval --index bm25:x", "--rerank hf:x"),
    ("--cache-tokens 9", "serve policy m --engine vllm", "--engine sglang"),
    ("--no-seeds", "serve policy m --engine vllm", "--engine sglang"),
    ("--adapters 8", "serve policy m --engine sglang", "--engine vllm"),
    ("--top 9", "serve policy m", "--engine vllm"),
    ("--sleeps", "serve policy m --device cpu", "--device cuda"),
    *((option, "index build --corpus c --out o", "--kind dense") for option in ("--dim 9", "--shard-rows 9")),
    ("--factory SQ8", "index build --corpus c --out o", "--kind hybrid"),
    ("--encoder minilm", "index build --corpus c --out o", "--kind dense"),
    ('--parameters {"nprobe":3}', "index build --corpus c --out o", "--kind dense"),
    ("--style e5", "index build --corpus c --out o --kind dense", "--encoder hf:x"),
    ("--passage-model x", "index build --corpus c --out o --kind dense --encoder a.b:c", "--encoder hf:x"),
    ("--dtype bfloat16", "index build --corpus c --out o --kind dense", "--encoder hf:x"),
    ("--device cuda", "index build --corpus c --out o --kind dense", "--encoder hf:x"),
    ("--dim 9", "index build --corpus c --out o --kind dense --encoder hf:x", "--encoder hashing"),
    ("--tasks 3", "result check f", "--agent random"),
    ("--env-kwargs {}x", "panel export-prompts p --out o", ""),
    ("--prompt {question}", "panel export-prompts p --out o --form tasks", "--form search-r1"),
    ("--channel tool", "panel export-prompts p --out o --form search-r1", "--form tasks"),
    ("--seed 1", "panel export-prompts p --out o --form search-r1", "--form tasks"),
    ("--env-kwargs {}x", "panel export-games p --out o", ""),
    ("--eval-every 3", "plan", "--steps 9"),
    ("--teacher-dtype bfloat16", "plan --teacher none", "--teacher 8B"),
    ("--shard-teacher", "plan --teacher none", "--teacher 8B"),
    ("--engine-memory .3", "plan", "--engine vllm"),
    ("--eval-split x", "pretrain --world alfworld", "--world a/B-v0"),
    ("--batch 3", "pretrain", "--world a/B-v0"),
    ("--tokenizer x", "trace print f", "--prompt"),
    ("--width 9", "trace print f", "--turns"),
    ("--seed 3", "bench rollout --models", "--models tiny"),
    ("--play.slots 3", "bench rollout --play.episodes 0", "--play.episodes 1"),
    ("--latex", "report r", "--out o"),
    ("--methods a b", "study plan", "--data d"),
    ("--first a b", "study plan --data d", ""),
    ("--train-hours 3", "study plan", "--difference 4"),
    ("--most-tasks 3", "study plan", "--difference 4"),
    ("--episodes 3", "study regime --run r", "--world w"),
    ("--shared .3", "study coverage", "--clusters 3"),
    ("--parallel 3", "study run f --print", "--no-print"),
]
S, URL, PANEL = "--student s --out o", "http://127.0.0.1:1", "--panel alfworld-quickstart"
ROWS += [
    *((option, f"train opd {S}", PANEL) for option in ("--eval-limit 3", "--eval-samples 2", "--eval-every 3")),
    ("--examples.form text", f"train opd {S}", "--examples f.txt"),
    ("--lora.alpha 8", f"train opd {S}", "--lora.rank 4"),
    ("--importance-cap 3", f"train opd {S}", "--staleness 1"),
    ("--project p", f"train opd {S}", "--tracker wandb"),
    ("--demonstrated-tasks", f"train luffy {S}", "--demonstrations expert"),
    ("--ray-address auto", f"train opd {S} --workers 2", "--workers ray:2"),
    ("--retries 5", f"train opd {S} --workers 0", "--workers 2"),
    ("--weight-sync gloo", f"train opd {S}", f"--policy-server {URL}"),
    ("--weight-folder x", f"train opd {S} --policy-server {URL} --weight-sync gloo", "--weight-sync disk"),
    ("--weight-address x", f"train opd {S} --policy-server {URL}", "--weight-sync nccl"),
    ("--engine-memory .3", f"train opd {S}", "--engine vllm"),
    ("--judge-votes 5", f"train prm-rl {S}", "--judge model:x"),
    ("--judge-model m", f"train prm-rl {S} --judge model:x", f"--judge {URL}/v1"),
    ("--judge-strict", f"train prm-rl {S} --judge rules", "--judge expert"),
    ("--distill.beta .3", f"train opd {S}", "--distill.form jsd"),
    ("--distill.clip .1 .2", f"train opd {S}", "--distill.form sampled"),
    ("--distill.top-k 9", f"train opd {S} --distill.form sampled", "--distill.form topk"),
    ("--lm-loss.column x", f"train grpo-minillm {S}", "--lm-loss.files x.parquet"),
    ("--lm-loss.coef 2", f"train grpo-minillm {S} --lm-loss.in-reward .5", "--lm-loss.in-reward 0"),
    ("--sft.mistakes .5", f"train sft {S}", "--sft.noise 0 .5"),
    ("--sft.loop-after 3", f"train sft {S}", "--sft.players expert:1,cycle:1"),
    ("--sft.noise 0 .5", f"train sft {S} --sft.players expert:1", "--sft.players noisy:1"),
    ("--sft.hints .5", f"train sft {S} --demonstrations random", ""),
    ("--keep-rollouts 2", f"train grpo {S} --traces old", ""),
    ("--staleness 1", f"train grpo {S} --traces old", ""),
    ("--grpo.refill 2", f"train grpo {S} --traces old", ""),
    ("--max-turns 3", f"train sft {S} --traces old", PANEL),
    ("--expert searching", f"train prm-rl {S}", "--judge expert"),
    ("--expert searching", f"train opd-hints {S} --judge rules", "--judge mine:Judge"),
    ("--expert searching", f"train tcod {S}", "--tcod.direction b2f"),
    ("--teacher-dtype bfloat16", f"train luffy {S}", "--luffy.kl-reward-coef .1"),
    ("--teacher-dtype bfloat16", f"train sdar {S} --sdar.kl-coef 0", "--sdar.kl-coef .1"),
    ("--reference-every 2", f"train grpo {S}", "--grpo.kl-coef .1"),
    ("--reference-every 2", f"train ppo-kd {S}", "--ppo-kd.kl-coef .1"),
    ("--reference-every 2", f"train sdar {S} --sdar.kl-coef 0", "--sdar.reader initial"),
    ("--demonstration-success", f"train tcod {S} --demonstrations expert", "--tcod.direction b2f"),
    ("--demonstration-success", f"train sft {S}", "--demonstrations expert"),
    ("--demonstrator.temperature .3", f"train luffy {S} --demonstrations expert", "--demonstrations model:x"),
    ("--token-ids", f"train luffy {S} --demonstrations model:x", "--demonstrations openai:x"),
    ("--dual-clip 2", f"train opd {S}", "--distill.form sampled"),
    ("--dual-clip 2", f"train opd-hints {S} --opd-hints.form topk", "--opd-hints.form sampled"),
    ("--opd-hints.clip .1 .2", f"train opd-hints {S} --opd-hints.form topk", "--opd-hints.form sampled"),
    ("--ppo-kd.lam .5", f"train ppo-kd {S} --ppo-kd.advantage minillm", "--ppo-kd.advantage gae"),
    (
        "--ppo-kd.single-step 1",
        f"train ppo-kd {S} --ppo-kd.student-entropy",
        "--ppo-kd.advantage minillm",
    ),
    (
        "--ppo-kd.single-step 1",
        f"train ppo-kd {S} --ppo-kd.advantage minillm",
        "--ppo-kd.student-entropy",
    ),
    ("--ppo-kd.critic.kind head", f"train ppo-kd {S} --ppo-kd.advantage minillm", "--ppo-kd.advantage gae"),
    ("--grpo.kl k1", f"train grpo {S}", "--grpo.kl-coef .1"),
    ("--grpo-kd.kl k1", f"train grpo-kd {S} --grpo-kd.kl-coef 0", "--grpo-kd.kl-coef .1"),
    ("--gigpo.gamma .5", f"train gigpo {S} --gigpo.w-step 0", "--gigpo.w-step 1"),
    ("--luffy.e 2", f"train luffy {S}", "--luffy.shape pow"),
    ("--luffy.a 2", f"train luffy {S} --luffy.shape pow", "--luffy.shape p_div_p_a"),
    ("--luffy.prefix.steps 9", f"train luffy {S}", "--luffy.prefix.strategy linear"),
    ("--luffy.prefix.low .5", f"train luffy {S} --luffy.prefix.strategy linear", "--luffy.prefix.strategy fixed"),
    ("--turnopd.blend-start .5", f"train turnopd {S} --turnopd.weight turn", "--turnopd.weight blend"),
    ("--turnopd.n-min 3", f"train turnopd {S} --turnopd.weight trajectory", "--turnopd.weight turn"),
    ("--importance-cap 3", f"serve proxy {S}", "--staleness 1"),
    ("--judge-votes 5", f"serve proxy {S}", "--judge model:x"),
    ("--opd-hints.kl-coef 1", f"serve proxy {S}", "--algorithm opd-hints"),
    ("--swap-wait 2", f"serve proxy {S} --policy-server {URL}", ""),
    ("--batch-turns 2", f"serve proxy {S} --no-train", ""),
]


@pytest.mark.parametrize(("option", "verb", "needed"), ROWS)
def test_an_option_needs_what_reads_it(
    option: str, verb: str, needed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = options.Verb.asked

    def only_read(verb: Any, argv: Any) -> Any:
        asked(verb, argv)
        raise Seen

    def read(*_: Any, **__: Any) -> Any:
        raise Seen

    monkeypatch.setattr(options.Verb, "asked", only_read)
    monkeypatch.setattr(distributed, "open_ranks", read)
    monkeypatch.setattr(serve_proxy, "serve", read)
    assert command.main([*verb.split(), *option.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    name = option.split()[0].removeprefix("--").removeprefix("no-").rpartition(".")[2]
    # of a table that is not there, what it must be given
    assert name in line.replace("_", "-") or "must be given" in line
    words = verb.split()
    # another value in the place of the one that is there
    for word in needed.split()[:1]:
        if word in words:
            del words[words.index(word) : words.index(word) + 1 + (len(needed.split()) > 1)]
        off = f"{word.rpartition('.')[0]}.no-{word.rpartition('.')[2]}"
        words = [one for one in words if one != off]
    words = [word for word in words if needed != "--no-print" or word != "--print"]
    with pytest.raises(Seen):
        command.main([*words, *needed.split(), *(option.split() if needed else [])])
