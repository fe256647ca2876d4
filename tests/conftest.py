"""Fixtures shared by all rooms: where the real test data is, unpacked once per machine."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import gymnasium as gym
import pytest
from hypothesis import HealthCheck, settings
from machine import computed_on

ROOT = Path(__file__).resolve().parents[1]
SMOKE = frozenset(
    {
        *("core/test_spec.py", "core/test_whole_files.py"),
        *("envs/test_guard.py", "envs/test_channels.py", "envs/test_lenient_reading.py", "envs/test_panels.py"),
        *("envs/test_text_env.py", "agents/test_scores.py", "agents/test_rollout.py"),
        *("trainers/test_batch.py", "trainers/test_returns.py", "trainers/test_group_advantages.py"),
        *("trainers/test_policy_gradient.py", "trainers/test_reverse_kl.py", "trainers/test_token_weights.py"),
        *("trainers/test_token_losses.py", "trainers/test_targets.py", "trainers/test_depth.py"),
        *("trainers/test_rloo.py", "trainers/test_options_arrive.py", "scripts/test_unread_options.py"),
    }
)
"""Files of tests that find most mistakes in a minute: `pytest -m smoke`."""
NIGHTLY = frozenset(
    {
        *("bench/test_faults.py", "scripts/test_stopped_children.py", "core/test_held_lock.py"),
        *("agents/test_template_limits.py", "agents/test_text_encoder.py", "core/test_http_client.py"),
        *("scripts/test_long_traces.py", "scripts/test_bench_rollout.py", "scripts/test_bench_gpu.py"),
        *("bench/test_bench_retrieval.py", "gpu/test_quarter_hour.py", "tools/test_measure_priors.py"),
        *("agents/test_executor_ray.py", "trainers/test_fleet_of_all.py", "trainers/test_log_sinks.py"),
        *("trainers/test_full_disk.py", "agents/test_alive.py", "bench/test_bench_trl.py"),
        "outside/test_scienceworld.py",
    }
)
"""Files whose long tests are of faults, hostile peers, growth and benches, of which one of a kind is quick, and of
other people's programs."""


ALL_LATE = re.compile(r"^pytestmark = (\[\n *)?pytest\.mark\.(long|nightly|sglang|vllm)\b", re.MULTILINE)


def pytest_configure(config: pytest.Config) -> None:
    """A shell that starts pytest in the background lets it ignore Ctrl-C, which tests of interruption send.

    No test asks the hub of models; those of a stand-in on this machine say so themselves. How long a drawn example
    takes says how busy the machine is, and fails no test; there are few of each test, and many by night (.ci/nightly).
    Each process of a job begins with another folder: what it compiles, with pytest's own assertions, the others find
    done.
    """
    drawn = int(os.environ.get("TURNGYM_EXAMPLES", "25"))
    settings.register_profile(
        "turngym", deadline=None, max_examples=drawn, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("turngym")
    os.environ["TURNGYM_OFFLINE"] = "1"
    if (input_ := getattr(config, "workerinput", None)) and [Path(one).name for one in config.args] == ["tests"]:
        tests = [path.relative_to(ROOT).parts[1] for path in sorted((ROOT / "tests").rglob("test_*.py"))]
        folders, place = [*dict.fromkeys(tests)], int(input_["workerid"].removeprefix("gw")) * len(tests)
        first = folders.index(tests[place // input_["workercount"]]) + (place > 0)
        config.args = [str(ROOT / "tests" / name) for name in (*folders[first:], *folders[:first])]
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """To read the files of all tests takes half a minute of a core, in each process: those without a test of the job
    are not read."""
    if not collection_path.name.startswith("test_") or _in_tests(collection_path) == "":
        return None
    asked = config.getoption("markexpr").split(" and ")
    if asked == ["smoke"]:
        return True if _in_tests(collection_path) not in SMOKE else None
    job, text = asked[0], collection_path.read_text(encoding="utf-8")
    if job == "not long":
        return True if ALL_LATE.search(text) else None
    held = f"mark.{job}" in text or (job == "long" and "from late import" in text)
    held = held or (job == "nightly" and _in_tests(collection_path) in NIGHTLY)
    return True if job in ("long", "nightly", "sglang", "vllm") and not held else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: item.path)  # all processes must know the tests in one order
    for item in items:
        if _in_tests(item.path) in SMOKE:
            item.add_marker("smoke")
        if _in_tests(item.path) in NIGHTLY and item.get_closest_marker("long"):
            item.add_marker("nightly")
        if item.get_closest_marker("nightly"):
            item.add_marker("long")


def _in_tests(path: Path) -> str:
    return path.relative_to(ROOT / "tests").as_posix() if path.is_relative_to(ROOT / "tests") else ""


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The last line says what the tests were computed with, so that a failure elsewhere can be told from one here."""
    terminalreporter.write_line(f"computed on {computed_on()}")


@pytest.fixture(autouse=True)
def environments_stay() -> Iterator[None]:
    """No test takes away an environment that another one finds: its module, once imported, registers it no more."""
    before = set(gym.registry)
    yield
    assert before <= set(gym.registry), f"this test took away {before - set(gym.registry)}"


def shared_data() -> Path | None:
    """The folder of real test data: `TURNGYM_TEST_DATA`, else `../shared/data` beside the checkout; None if absent."""
    path = Path(os.environ.get("TURNGYM_TEST_DATA", ROOT.parent / "shared" / "data"))
    return path if path.is_dir() else None


def unpack_alfworld() -> Path | None:
    """The 4,027 real games in `$ALFWORLD_DATA` layout, unpacked once into the temporary folder; None without them."""
    data = shared_data()
    if data is None or not (data / "alfworld" / "unpack.py").exists():
        return None
    size = (data / "alfworld" / "games.jsonl.xz").stat().st_size
    target = Path(tempfile.gettempdir()) / f"turngym-test-alfworld-{size}"
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            subprocess.run(
                [sys.executable, str(data / "alfworld" / "unpack.py"), scratch], check=True, capture_output=True
            )
            try:
                Path(scratch, "json_2.1.1").rename(target)
            except OSError:  # another worker was first
                if not target.exists():
                    raise
    return target


@pytest.fixture(scope="session")
def alfworld_data() -> Path:
    """Root with the folders train, valid_seen, valid_unseen, valid_train."""
    path = unpack_alfworld()
    if path is None:
        pytest.skip("real ALFWorld games not found: put them under ../shared/data or set TURNGYM_TEST_DATA")
    return path


def _shared(name: str, marker: str) -> Path:
    data = shared_data()
    if data is None or not (data / name / marker).exists():
        pytest.skip(f"real {name} data not found: put it under ../shared/data or set TURNGYM_TEST_DATA")
    return data / name


@pytest.fixture(scope="session")
def webshop_data() -> Path:
    """Folder with items_shuffle_1000.json, items_ins_v2_1000.json, items_human_ins.json, transcripts.jsonl.xz."""
    return _shared("webshop", "items_shuffle_1000.json")


@pytest.fixture(scope="session")
def search_data() -> Path:
    """Folder with {hotpotqa,2wiki}_{corpus,questions}.jsonl, nq_open_dev.jsonl, popqa_1000.jsonl."""
    return _shared("search", "2wiki_corpus.jsonl")
