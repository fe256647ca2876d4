"""Checkpoints and model folders: a byte that changed is refused, and `turngym model verify` names the file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import toy_run as toy

from turngym.agents.models import file_hashes, load_model, load_policy
from turngym.agents.saved_model import save_model
from turngym.core import files as folder_sums
from turngym.core.errors import ModelError, TurngymError
from turngym.core.files import SUMS_FILE, ChangedFileError, check_sums
from turngym.scripts.main import main
from turngym.trainers.checkpoint import CheckpointError, latest_checkpoint, read_state


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("sums") / "run"
    toy.trainer(run, steps=1).train()
    return run


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "run"))


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["model/model.safetensors", "model/config.json", "optimizer.pt"])
def test_a_changed_byte_of_a_checkpoint_is_refused(run: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "verify", str(run)]) == 0
    assert "files are whole" in capsys.readouterr().out
    path = latest_checkpoint(run) / name
    flip(path, -10)
    with pytest.raises(CheckpointError, match=rf"damaged.*{path.name} was changed"):
        toy.trainer(run, steps=1).train(resume=True)
    assert main(["model", "verify", str(run)]) == 1
    assert f"{path.name} was changed after it was written (its checksum differs)" in capsys.readouterr().err


def test_a_changed_state_is_refused(run: Path) -> None:
    path = latest_checkpoint(run) / "state.json"
    text = path.read_text()
    path.write_text(text.replace('"evaluated": ', '"evaluated": 1'))
    with pytest.raises(CheckpointError, match="its checksum differs"):
        read_state(path.parent)
    path.write_text(text[: text.rindex(",")] + "}")
    with pytest.raises(CheckpointError, match="its checksum differs"):
        read_state(path.parent)
    path.write_text("[]")
    with pytest.raises(CheckpointError, match=r"state\.json cannot be read"):
        read_state(path.parent)


def test_a_changed_byte_of_a_model_is_refused_by_both_loaders(run: Path) -> None:
    model = latest_checkpoint(run) / "model"
    names = file_hashes(model)
    assert SUMS_FILE not in names
    flip(model / "model.safetensors", -1)
    words = r"model is damaged: model\.safetensors was changed.*delete .*turngym\.sums"
    for load in (load_model, load_policy):
        with pytest.raises(ChangedFileError, match=words):
            load(model)
    (model / SUMS_FILE).unlink()
    load_model(model)


def test_only_sizes_are_compared_where_reading_all_would_cost(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = latest_checkpoint(run) / "model"
    monkeypatch.setattr(folder_sums, "CHEAP", 100)
    flip(model / "model.safetensors", -1)
    check_sums(model)
    with (model / "model.safetensors").open("ab") as file:
        file.write(b"x")
    with pytest.raises(ChangedFileError, match=r"bytes, .* were written"):
        check_sums(model)


def test_damaged_checksums_say_so_and_a_model_that_is_saved_again_drops_them(run: Path) -> None:
    model = latest_checkpoint(run) / "model"
    loaded = load_model(model)
    flip(model / SUMS_FILE, 20)
    with pytest.raises(ChangedFileError, match=r"turngym\.sums is damaged"):
        check_sums(model)
    save_model(loaded, model)
    assert not (model / SUMS_FILE).exists()
    load_model(model)


def test_damaged_weights_without_checksums_are_one_line(run: Path) -> None:
    model = latest_checkpoint(run) / "model"
    (model / SUMS_FILE).unlink()
    weights = model / "model.safetensors"
    weights.write_bytes(b"\xff" * 100 + weights.read_bytes()[100:])
    with pytest.raises(ModelError, match="cannot load the model in"):
        load_model(model)


def test_weights_that_are_not_there_are_not_made_up(run: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = latest_checkpoint(run) / "model"
    (model / SUMS_FILE).unlink()
    whole = load_file(model / "model.safetensors")
    assert "lm_head.weight" not in whole  # tied to the embedding, and so not missing
    load_model(model)
    lost = [name for name in whole if "layers.0." in name]
    rest = {name: weight for name, weight in whole.items() if name not in lost}
    for gone in (lost[:1], lost):
        kept = rest | {name: whole[name] for name in lost if name not in gone}
        save_file(kept, model / "model.safetensors", metadata={"format": "pt"})
        said = rf"its files lack the weights {min(gone)}.*; they would be random"
        with pytest.raises(ModelError, match=said):
            load_model(model)
    save_file(whole, model / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "vocab_size": config["vocab_size"] + 7}))
    with pytest.raises(ModelError, match=r"have \S+embed_tokens\.weight as \[\d+, \d+\], its config.json says \["):
        load_model(model)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("/no/such", r"there is no folder /no/such\. A model is a folder with config\.json"),
        # a file of that name would be no model
        ("runs/stduent", r"there is no folder runs/stduent\. Did you mean 'student'\?$"),
        (
            "Qwen/Qwen3-0.6B",
            r"\$TURNGYM_OFFLINE is set: .*`hf download Qwen/Qwen3-0\.6B --local-dir FOLDER`\) and name the folder$",
        ),
        ("m.gguf", r"`turngym model import m\.gguf --out FOLDER` makes a model folder .*llama\.cpp"),
        ("none.gguf", r"there is no folder none\.gguf\. Did you mean 'm\.gguf'\?$"),
        ("runs", r"runs holds no model: config\.json, model\.safetensors and a tokenizer are needed$"),
        ("runs/opd", r"runs/opd holds no model; the model is in runs/opd/checkpoints/step_000020/model$"),
    ],
)
def test_a_path_without_a_model_names_the_remedy(
    name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("student", "opd/checkpoints/step_000010/model", "opd/checkpoints/step_000020/model"):
        (tmp_path / "runs" / folder).mkdir(parents=True)
    for file in ("m.gguf", "notes.txt"):
        (tmp_path / file).touch()
    with pytest.raises(ModelError, match=said):
        load_model(name)


@pytest.mark.parametrize(
    ("device", "words"), [("cuda", "no CUDA GPU; use --device cpu"), ("gpu", "'gpu' is no device; valid: auto, cpu")]
)
def test_a_device_that_is_not_there(run: Path, device: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    for load in (load_model, load_policy):
        with pytest.raises(TurngymError, match=words):
            load(latest_checkpoint(run) / "model", device=device)


def test_verify_of_what_has_no_checksums(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "verify", str(tmp_path)]) == 2
    assert "holds no turngym.sums" in capsys.readouterr().err
    assert main(["model", "verify", str(tmp_path / "none")]) == 2
