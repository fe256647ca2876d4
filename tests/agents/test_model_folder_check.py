"""Folders of models that somebody sent are checked before a library opens a file of them."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from turngym.agents import load_world
from turngym.agents.models import file_hashes, hub_folder, load_tokenizer
from turngym.agents.rendering.chat_settings import ChatSettings
from turngym.agents.rendering.chat_template import ChatTemplate, RenderError
from turngym.core.errors import ModelError, RetrievalError, TurngymError
from turngym.core.files import ChangedFileError, locked_folder, read_sums
from turngym.core.line_file import LineFile
from turngym.core.manifest import write_manifest
from turngym.core.model_folder_check import check_model_files
from turngym.core.trace import TraceError, TraceWriter
from turngym.retrieval.encoders import HuggingFaceEncoder
from turngym.retrieval.hybrid import open_reranker


@pytest.mark.parametrize("name", ["vocab.txt", "generation_config.json", "additional_chat_templates/rag.jinja"])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_what_is_no_file_is_in_no_model(name: str, kind: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(ModelError, match=f"holds {path.name}, which is no file"):
        hub_folder(tmp_path)
    with pytest.raises(RetrievalError, match=f"holds {path.name}, which is no file"):
        HuggingFaceEncoder(str(tmp_path), "plain")
    with pytest.raises(RetrievalError, match=f"holds {path.name}, which is no file"):
        open_reranker(f"hf:{tmp_path}")


def test_a_further_template_is_part_of_a_model(tmp_path: Path) -> None:
    folder = shutil.copytree(load_world("alfworld").checkpoint("student"), tmp_path / "model")
    plain = file_hashes(folder)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ messages }}")
    assert file_hashes(folder).keys() - plain.keys() == {"additional_chat_templates/tool_use.jinja"}


def test_a_template_may_lie_with_what_prepares_images(tmp_path: Path) -> None:
    folder = shutil.copytree(load_world("alfworld").checkpoint("student"), tmp_path / "model")
    template = load_tokenizer(folder).chat_template
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    assert load_tokenizer(folder).chat_template == template
    (folder / "chat_template.jinja").unlink()
    assert load_tokenizer(folder).chat_template == "{{ messages }}"


@pytest.mark.parametrize("shard", ["../w.safetensors", "/w.safetensors", "more/w.safetensors", "..", ""])
def test_weights_lie_in_the_folder(shard: object, tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": {"a": "model-1.safetensors"}}))
    check_model_files(tmp_path)
    index.write_text(json.dumps({"metadata": {}, "weight_map": {"a": "model-1.safetensors", "b": shard}}))
    with pytest.raises(ModelError, match=r"index\.json names .* as a file of weights"):
        check_model_files(tmp_path)


@pytest.mark.parametrize(
    ("content", "key"),
    [
        ({"weight_map": {"a": "b"}}, "metadata"),
        ({"metadata": None, "weight_map": {"a": "b"}}, "metadata"),
        ({"metadata": {}}, "weight_map"),
        ({"metadata": {}, "weight_map": {}}, "weight_map"),
        ({"metadata": {}, "weight_map": {"a": 3}}, "weight_map"),
        ([], "object"),
    ],
)
def test_an_index_of_shards_says_which_key_is_wrong(content: object, key: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(content))
    with pytest.raises(ModelError, match=rf"index\.json: .*{key}"):
        check_model_files(tmp_path)


def test_json_that_takes_gigabytes_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"x": [' + "[]," * 9_000_000 + "0]}")
    with pytest.raises(ModelError, match=r"config\.json cannot be read: it has more than .* values"):
        check_model_files(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "key"),
    [
        ("tokenizer_config.json", {"eos_token": ["a"]}, "eos_token"),
        ("tokenizer_config.json", {"model_max_length": "x"}, "model_max_length"),
        ("tokenizer_config.json", {"model_max_length": -1}, "model_max_length"),
        ("tokenizer_config.json", {"extra_special_tokens": [1]}, "extra_special_tokens"),
        ("tokenizer_config.json", {"pad_token": {"a": 1}}, "content.*pad_token"),
        ("special_tokens_map.json", {"eos_token": 1}, "str"),
        ("generation_config.json", {"pad_token_id": "x"}, "pad_token_id"),
        ("config.json", None, "object"),
        ("chat_template.json", {}, "chat_template"),
        ("adapter_config.json", {"alpha_pattern": True}, "alpha_pattern"),
        ("adapter_config.json", {"r": "8"}, r"\$\.r"),
        ("adapter_config.json", {"base_model_name_or_path": "a\0"}, "base_model_name_or_path"),
    ],
)
def test_a_small_file_says_which_key_is_wrong(name: str, content: object, key: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(ModelError, match=rf"{re.escape(name)}: (Expected|Object missing) .*{key}"):
        check_model_files(tmp_path)


@pytest.mark.parametrize(("text", "said"), [(b"\xff\xfea\0", "UTF-16"), (b"a\n\xe9", "line 2"), (b"a\0", "zero byte")])
def test_a_template_is_text(text: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(text)
    with pytest.raises(ModelError, match=rf"chat_template\.jinja.*{said}"):
        check_model_files(tmp_path)


def test_a_byte_order_mark_is_no_part_of_a_prompt(tmp_path: Path) -> None:
    folder = shutil.copytree(load_world("alfworld").checkpoint("student"), tmp_path / "model")
    path = folder / "chat_template.jinja"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    with pytest.raises(RenderError, match=r"chat_template\.jinja begins with a byte order mark"):
        ChatTemplate(load_tokenizer(folder))


@pytest.mark.parametrize(
    ("key", "value"), [("channel", "zz"), ("system", "\ud800"), ("history", "\ud800"), ("memory", "zz")]
)
def test_how_a_model_is_spoken_to_is_refused_with_its_file(key: str, value: str, tmp_path: Path) -> None:
    (tmp_path / "turngym.json").write_text(json.dumps({key: value}))
    with pytest.raises(TurngymError, match=r"turngym\.json"):
        ChatSettings.load(tmp_path)


@pytest.mark.parametrize("text", ["{", "", "[]"])
def test_ends_of_answers_are_not_lost_with_a_torn_file(text: str, tmp_path: Path) -> None:
    """transformers would go on without them."""
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ModelError, match=r"generation_config\.json"):
        check_model_files(tmp_path)


@pytest.mark.parametrize("name", ["../../dev/zero", "/dev/zero"])
def test_checksums_are_of_files_of_the_folder(name: str, tmp_path: Path) -> None:
    write_manifest(tmp_path / "turngym.sums", {"files": {name: {"bytes": 0, "crc32": 0}}})
    with pytest.raises(ChangedFileError, match="outside of the folder"):
        read_sums(tmp_path)


def test_what_is_written_in_a_folder_follows_no_link(tmp_path: Path) -> None:
    mine, folder = tmp_path / "mine", tmp_path / "run"
    mine.write_text("mine")
    folder.mkdir()
    for name in (".turngym.lock", "trace.jsonl"):
        (folder / name).symlink_to(mine)
    with pytest.raises(TurngymError, match="a link"), locked_folder(folder):
        pass
    with pytest.raises(TraceError, match="a link"):
        TraceWriter(folder / "trace.jsonl")
    assert mine.read_text() == "mine"


def test_half_a_line_that_a_disk_kept_goes_with_the_next_line(tmp_path: Path) -> None:
    class Failing:
        """A disk that takes half of a line and then nothing, not even a shorter file."""

        def __init__(self, file: Any) -> None:
            self.file, self.fails = file, False

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

        def write(self, data: Any) -> int:
            if self.fails:
                self.file.write(bytes(data)[:3])
                raise OSError(5, "Input/output error")
            return int(self.file.write(data))

        def truncate(self, size: int) -> int:
            if self.fails:
                raise OSError(5, "Input/output error")
            return int(self.file.truncate(size))

    lines = LineFile(tmp_path / "x.jsonl")
    lines.file = disk = Failing(lines.file)
    for number, fails in enumerate([False, True, True, False, False]):
        disk.fails = fails
        if fails:
            with pytest.raises(OSError, match="Input/output"):
                lines.append(f"line {number}\n".encode())
        else:
            lines.append(f"line {number}\n".encode())
    lines.close()
    assert (tmp_path / "x.jsonl").read_text() == "line 0\nline 3\nline 4\n"
