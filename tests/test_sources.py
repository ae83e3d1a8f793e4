"""Where checkpoints are: names with steps, folders, the Hub and its cache."""

import sys
from pathlib import Path

import pytest
import torch
from checkpoint_files import assert_is, make, model, save, shard
from hypothesis import given
from hypothesis import strategies as st

from normgrowth.checkpoints import find, series
from normgrowth.checkpoints.steps import step_of


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("step-1.5M", 1_500_000), ("global_step500", 500), ("000250", 250), ("stage1-step1000-tokens3B", 1000),
        ("multiberts-seed_3-step_1700k", 1_700_000), ("epoch=3-step=1200", 1200),
        ("TinyLlama-1.1B-intermediate-step-50K-105b", 50_000), ("step0", 0), ("step1000tokens4B", 1000),
        ("checkpoint-5.safetensors", 5), ("step1.5", None), ("step1-step2", None), ("seed_3", None), ("main", None),
        ("model-00001-of-00003", None), ("footstep3", None), ("step20kb", None), ("2024-05-01", None), ("", None),
        ("ckpt_007_500", 7), ("step7_224px", 7), ("1,500.5k", 1_500_500), ("Iter_20k", 20_000), ("ep0-ba100", 100),
        ("ep12-ba3400-rank0", 3400), ("batch_64", None), ("model-100", 100), ("Model_100", 100), ("1000_steps", 1000),
        ("20k-steps", 20_000), ("1000step", 1000), ("run_1,000steps", 1000), ("checkpoint_12_345", 345),
        ("checkpoint_1_000_000", 1_000_000), ("checkpoint1", None), ("checkpoint_best", None),
        ("checkpoint20k", 20_000), ("model_7b", None), ("model", None), ("step10-ba20", 10), ("1000stepsize", None),
    ],
)  # fmt: skip
def test_step_of(name, step):
    assert step_of(name) == step


@given(
    st.integers(0, 10**12),
    st.sampled_from(["step{}", "checkpoint-{}", "{}", "step={}", "step_{}-tokens4B", "epoch=1-step={}"]),
    st.sampled_from(["{}", "{:010d}", "{:,}", "{:_}"]),
)
def test_every_step_is_read_back(step, form, digits):
    assert step_of(form.format(digits.format(step))) == step


def cached(root, repository, **revisions):
    """One repository in the Hub's cache."""
    place = f"{root}/models--lab--{repository}"
    files = {f"{place}/snapshots/hash-{ref}/model.safetensors": seed for ref, seed in revisions.items()}
    return files | {f"{place}/refs/{ref}": f"hash-{ref}" for ref in revisions}


TWINS = {f"step{s}/{part}/model.safetensors": s + 10 * (part == "vae") for s in (1, 2) for part in ("unet", "vae")}
NONE = "no .safetensors, .bin, .pt, .pth or .ckpt file in it"
NO_STEP = "no step in its name, or two; --step takes a pattern that finds it"
EPOCHS = "no step (epochs are not steps; rename, such as step500, or give --step)"
# Files, of the model of a seed or with a text; sources and options; then the seeds by step and what is skipped, or why
# there is nothing.
PLACES = {
    "names of tools": ({f"{name}/model.safetensors": i for i, name in enumerate(
        ("iter_0000005", "checkpoint-900", "step1000-tokens4B", "step_20k", "step-1.5M", "ep0-ba100"))}, ["."], {},
        {5: 0, 100: 5, 900: 1, 1000: 2, 20_000: 3, 1_500_000: 4}, []),
    "files": ({"step200.safetensors": 1, "step1000.pt": 2, "notes.txt": "x"}, ["."], {}, {200: 1, 1000: 2}, []),
    "files of Lightning": ({f"epoch={s}-step={100 * s}.ckpt": s for s in (1, 2)}, ["."], {}, {100: 1, 200: 2}, []),
    "one file": ({"epoch=1-step=200.ckpt": 1, "step5.pt": 2}, ["epoch=1-step=200.ckpt"], {}, {200: 1}, []),
    "several folders": ({f"step{s}/model.safetensors": s for s in (0, 10, 20)}, ["step20", "step0", "step10"], {},
                        {0: 0, 10: 10, 20: 20}, []),
    "a folder deeper, and a final copy": ({f"checkpoint-{s}/hf/w.bin": s for s in (1, 2)} | {"model.safetensors": 2},
                                          ["."], {}, {1: 1, 2: 2}, []),
    "a step within a step": ({f"step{s}/iter_{s}/w.pt": s for s in (1, 2)} | {"final/hf/w.pt": 2}, ["."], {},
                             {1: 1, 2: 2}, [f"final/hf: {NO_STEP}"]),
    "one of two folders of weights": (TWINS, ["step1/unet", "step2/unet"], {}, {1: 1, 2: 2}, []),
    "two folders in one step": (TWINS | {"step3/only/w.pt": 3, "step3/logs/x": "x"}, ["."], {}, {3: 3},
                                [f"step{s}: 2 folders with weights, unet, vae: give one of them" for s in (1, 2)]),
    "one checkpoint": ({"step3/model/model.safetensors": 3}, ["step3"], {}, {3: 3}, []),
    "its folder": ({"step3/model/model.safetensors": 3}, ["step3/model"], {}, {3: 3}, []),
    "its file": ({"step3/model/model.safetensors": 3}, ["step3/model/model.safetensors"], {}, {3: 3}, []),
    "match": ({f"{n}-step{s}/w.pt": s for s, n in ((1, "run"), (2, "other"), (3, "run"))}, ["."], {"match": "run*"},
              {1: 1, 3: 3}, []),
    "a pattern": ({f"phase2_{s}k-best/w.pt": s for s in (1, 2)}, ["."], {"step": r"phase2_(\d+k)"},
                  {1000: 1, 2000: 2}, []),
    "the same step": ({"a-step1/w.pt": 1, "b-step1/w.pt": 2}, ["."], {}, {1: 1},
                      ["b-step1: step 1 is {}/a-step1 too, other weights"]),
    "an empty folder": ({"step1/w.pt": 1, "step2/": ""}, ["."], {}, {1: 1}, [f"step2: {NONE}"]),
    "only an optimizer": ({"step1/w.pt": 1, "step2/optimizer_0/w.pt": 1}, ["."], {}, {1: 1}, [f"step2: {NONE}"]),
    "a cache": (cached(".", "m", main=9, step10=10, step20=20), ["models--lab--m"], {}, {10: 10, 20: 20},
                [f"m@main: {NO_STEP}"]),
    "caches of one each": (cached(".", "m-step5", main=5) | cached(".", "m-step6", main=6),
                           ["models--lab--m-step5", "models--lab--m-step6"], {}, {5: 5, 6: 6}, []),
    "a cache with steps twice": (cached(".", "m-step9", main=1, step5=5), ["models--lab--m-step9"], {}, {5: 5},
                                 [f"@main: {NO_STEP}"]),
    "a cache without steps": (cached(".", "m", main=5), ["models--lab--m"], {}, {0: 5}, []),
    "nothing": ({"notes.txt": "x"}, ["."], {}, None, "such as step1000, checkpoint-1000 or step_20k"),
    "no step": ({"final/w.pt": 1}, ["."], {}, {0: 1}, []),
    "two without steps": ({"final/w.pt": 1, "best/w.pt": 2}, ["."], {}, None, f"best: {NO_STEP}"),
    "no steps": ({f"run{x}-x/w.pt": 1 for x in "abcdef"}, ["."], {}, None,
                 "runa-x: {no} (and 5 more like it, to {}/runf-x)"),
    **{f"epochs {name}": ({name.format(i): i for i in (1, 2)}, ["."], {}, None, EPOCHS)
       for name in ("epoch_{}/w.pt", "epoch={}.ckpt", "ep{}/w.pt", "checkpoint{}/w.pt")},
    "folders of series": ({f"{n}/step{s}/w.pt": s for n in "ab" for s in (1, 2)} | {"empty/": ""}, ["."], {}, None,
                          "no checkpoint with a step in its name"),
    "no match": ({"step1/w.pt": 1}, ["."], {"match": "x*"}, None, "only names that match 'x*' count"),
    "no such pattern": ({"step1/w.pt": 1}, ["."], {"step": r"at(\d+)"}, None,
                        r"no name in which 'at(\\d+)' finds a step"),
    "no group": ({"step1/w.pt": 1}, ["."], {"step": "at"}, None, "--step 'at': put ( ) around the number"),
    "no pattern": ({"step1/w.pt": 1}, ["."], {"step": "("}, None, "--step '(' is not a regular expression"),
    "no row": ({"step1/w.pt": 1}, ["."], {"by": "block"}, None, "choose total, layer, type, tensor"),
}  # fmt: skip


@pytest.mark.parametrize("what", PLACES)
def test_places_and_the_steps_of_what_is_there(tmp_path, what):
    files, given, options, steps, expected = PLACES[what]
    root = tmp_path / "run-x"
    for name, content in files.items():
        place = root / name
        (place if name.endswith("/") else place.parent).mkdir(parents=True, exist_ok=True)
        if isinstance(content, int):
            save(model(content), place.parent, place.name)
        elif not name.endswith("/"):
            place.write_text(content)
    names = [str(root / name) for name in given]
    if steps is None:
        with pytest.raises(ValueError) as error:
            series(names, **options)
        assert expected.replace("{no}", NO_STEP).replace("{}", str(root)) in str(error.value)
        return
    result = series(names, **options)
    assert_is(result.table, {step: model(seed) for step, seed in steps.items()})
    assert len(result.skipped) == len(expected)
    for skip, words in zip(result.skipped, expected, strict=True):
        assert words.replace("{}", str(root)) in f"{skip.label}: {skip.why}", str(skip)


@pytest.mark.parametrize("name", ["no/such/place", "./-x/y", "x y/z", "nothing", "lab/model@", "./lab/model"])
def test_what_is_no_place_and_no_repository_is_refused(name):
    with pytest.raises(FileNotFoundError, match="no such folder, and no name of a Hub repository"):
        find.checkpoints(name)


def test_links_that_lead_nowhere_and_folders_that_may_not_be_read_are_skipped(tmp_path, monkeypatch):
    make(tmp_path, steps=(1, 2))
    (tmp_path / "step3").symlink_to("gone")
    (tmp_path / "step4.pt").symlink_to("there.pt")
    plain = Path.iterdir

    def iterdir(path):
        if path.name == "step2":
            raise PermissionError(13, "Permission denied", str(path))
        return plain(path)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    result = series(tmp_path)
    assert list(result.table.step) == [1]
    assert [str(s) for s in result.skipped] == [
        f"{tmp_path / 'step2'}: cannot be read: Permission denied",
        f"{tmp_path / 'step3'}: cannot be read: No such file or directory",
        f"{tmp_path / 'step4.pt'}: cannot be read: No such file or directory",
    ]


def test_of_300_folders_of_one_kind_there_is_one_line(tmp_path):
    make(tmp_path, steps=(1, 2))
    for step in range(10, 310):
        (tmp_path / f"step{step}").mkdir()
    save({"base_layer.w": torch.ones(2)}, tmp_path / "step400")
    lines = find.grouped(series(tmp_path).skipped)
    assert lines[0] == f"{tmp_path / 'step10'}: {NONE} (and 299 more like it, to {tmp_path / 'step309'})"
    assert len(lines) == 2 and "merge_and_unload" in lines[1] and find.grouped([]) == []


@pytest.mark.parametrize("keep", [True, False])
def test_revisions_of_a_repository(hub, tmp_path, keep):
    """Of each only the weights are fetched, in one format; they are deleted unless they are kept."""
    states = {step: model(step) for step in (0, 512, 1000, 20_000)}
    hub.add("lab/model", "main", states[20_000])
    for step, state in reversed(states.items()):
        hub.add("lab/model", f"step{step}", state)
    shard(hub.add("lab/model", "step4k", None), model(4), 3)
    hub.add("lab/model", "step5k", None)
    hub.add("lab/model", "step6k", model(6, layers=1))
    hub.add("lab/model", "step8k", {"lora_A.weight": torch.ones(2, 8)}, name="adapter_model.safetensors")
    hub.add("lab/model", "step9k", model(9), name="pytorch_model.bin")
    result = series("lab/model", keep=keep)
    assert_is(result.table, states | {4000: model(4), 9000: model(9)})
    assert [str(skip) for skip in result.skipped] == [
        f"lab/model@main: {NO_STEP}",
        f"lab/model@step5k: {NONE}",
        "lab/model@step6k: other tensors than lab/model@step20000: no transformer.h.1.mlp.bias, "
        "no transformer.h.1.mlp.weight",
        "lab/model@step8k: only an adapter: merge it into its model first (merge_and_unload)",
    ]
    again = [] if keep else ["step20000"]  # with which the others are compared
    whole = ["step0", "step1000", "step20000", *again, *["step4k"] * 4, "step512", "step6k", "step8k", "step9k"]
    assert sorted(hub.fetched()) == whole and not list(tmp_path.glob("nbutils-*"))
    assert (tmp_path / "cache").exists() == keep


def test_a_hub_series_goes_on_without_downloads(hub, tmp_path):
    states, out = {step: model(step) for step in (0, 10, 20)}, tmp_path / "norms.csv"
    for step, state in states.items():
        hub.add("lab/model", f"step{step}", state)
    first = series("lab/model", out=out, keep=False)
    hub.asked.clear()
    assert series("lab/model", out=out, keep=False).table.equals(first.table) and not hub.asked
    states[40] = model(40)
    hub.add("lab/model", "step40", states[40])
    assert_is(series("lab/model", out=out, keep=False).table, states)
    assert set(hub.fetched()) == {"step20", "step40"}


def test_a_hub_that_fails_midway_loses_nothing(hub, tmp_path):
    states, out = {step: model(step) for step in (0, 10, 20, 30)}, tmp_path / "norms.csv"
    folders = {step: hub.add("lab/model", f"step{step}", state) for step, state in states.items()}
    hub.down = {folders[20].name}
    with pytest.raises(ConnectionError, match="lab/model@step20: cannot get its"):
        series("lab/model", out=out)
    hub.down = set()
    hub.asked.clear()
    assert_is(series("lab/model", out=out).table, states)
    assert hub.fetched() == ["step20"], "the others are in the cache"


def test_several_repositories_and_pinned_revisions(hub):
    states = {step: model(step) for step in (0, 20_000, 40_000)}
    for step, state in states.items():
        hub.add(f"lab/bert-seed_0-step_{step // 1000}k", "main", state, name="pytorch_model.bin")
    assert_is(series([f"lab/bert-seed_0-step_{k}k" for k in (20, 0, 40)]).table, states)
    commit = hub.repos["lab/bert-seed_0-step_20k"]["main"]  # pinned, it names no step, but the repository does
    assert list(series(f"lab/bert-seed_0-step_20k@{commit}").table.step) == [20_000]
    hub.add("lab/model", "step7", states[0])
    hub.add("lab/model", "step8", states[0])
    result = series(["lab/model@step7", "lab/model@step99"])
    assert list(result.table.step) == [7]
    assert [str(skip) for skip in result.skipped] == ["lab/model@step99: its weights: not on the Hub"]


def test_no_such_repository_no_network_and_no_package(hub, monkeypatch):
    begins = "no such folder; as a repository of the Hub: "
    for read in (series, find.model_folder):
        with pytest.raises(FileNotFoundError, match=f"lab/none: {begins}not on the Hub, or no access"):
            read("lab/none")
    hub.down = {"lab/model"}
    with pytest.raises(ConnectionError, match=rf"{begins}cannot get the list .*cache"):
        series("lab/model")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConnectionError, match=f"{begins}to read it, pip install huggingface_hub, or 'norm-growth"):
        series("lab/model")


def test_a_saved_model_of_the_hub(hub):
    """Weights in one format, configuration and tokenizer, and no code; without a network from the cache."""
    state, beside = model(7), ("config.json", "tokenizer.json", "vocab.txt", "own.py", "model.onnx", "training.log")
    for revision in ("main", "step7"):
        folder = hub.add("lab/model", revision, state)
        save(state, folder, "pytorch_model.bin")
        for name in beside:
            (folder / name).write_text("{}")
    texts = ["config.json", "tokenizer.json", "vocab.txt"]
    for name in ("lab/model", "lab/model@step7"):
        found = find.model_folder(name)
        assert sorted(file.name for file in found.iterdir()) == sorted([*texts, "model.safetensors"])
    hub.down = {"lab/model"}
    assert find.model_folder("lab/model@step7") == found
    with pytest.raises(ConnectionError, match="lab/other: no such folder; as a repository of the Hub: cannot get"):
        hub.down.add("lab/other")
        find.model_folder("lab/other")
    hub.down = set()
    hub.add("lab/words", "main", state)
    (hub.root / "lab/words" / hub.repos["lab/words"]["main"] / "tokenizer.json").write_text("{}")
    assert [file.name for file in find.model_folder("lab/words", weights=False).iterdir()] == ["tokenizer.json"]


SERIES = {  # a name; by its number what the file records; the steps
    "steps, whose first one may be an epoch": ("checkpoint_{:04}.pth.tar", {0: (0, 1), 20: (1, 20)}, [0, 20]),
    "steps without an optimizer's count": ("checkpoint_{}.pt", {1: (0, None), 2: (0, None), 16: (0, None)}, [1, 2, 16]),
    "steps, the first without a count": ("checkpoint_{}.pt", {0: (0, None), 20: (1, 20)}, [0, 20]),
    "epochs": ("checkpoint-{}.pth.tar", {1: (1, 50), 2: (2, 100), 3: (3, 150)}, [50, 100, 150]),
    "averages alone": ("ema_{}.pt", {10: (None, None), 20: (None, None)}, [10, 20]),
}  # fmt: skip


@pytest.mark.parametrize(("name", "files", "steps"), SERIES.values(), ids=SERIES)
@pytest.mark.parametrize("one_by_one", [False, True], ids=["a folder", "its files"])
def test_whether_numbers_in_names_are_epochs_is_decided_for_the_series(tmp_path, name, files, steps, one_by_one):
    for number, (epoch, count) in files.items():
        stored = {"state_dict": {"weight": torch.full((2, 2), float(number + 1))}}
        if epoch is not None:
            stored["epoch"] = epoch
        if count is not None:
            state = {0: {"step": torch.tensor(float(count)), "exp_avg": torch.zeros(2, 2)}}
            stored["optimizer"] = {"state": state, "param_groups": [{"params": [0]}]}
        torch.save(stored, tmp_path / name.format(number))
    sources = sorted(tmp_path.iterdir()) if one_by_one else tmp_path
    measured = series(sources)
    table = measured.table[measured.table.layer == "total"]
    assert list(table.step) == steps and not measured.skipped
    assert list(table.norm) == pytest.approx([2 * (number + 1) for number in files], rel=1e-12)


def test_averages_are_measured_where_a_pattern_asks_for_them_and_a_file_that_holds_one_alone_says_so(tmp_path):
    for step in (1, 2):
        torch.save({"weight": torch.full((2, 2), float(step))}, tmp_path / f"model_{step}.pt")
        torch.save({"step": step, "ema": {"weight": torch.full((2, 2), 3.0 * step)}}, tmp_path / f"ema_{step}.pt")
    assert list(series(tmp_path).table.norm) == [2.0, 4.0]
    averages = series(tmp_path, step=r"ema_(\d+)")
    assert list(averages.table[averages.table.layer == "total"].norm) == [6.0, 12.0]
    assert any("an average of the weights (EMA)" in note for note in averages.notes)
