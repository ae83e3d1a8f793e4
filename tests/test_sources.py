"""Where checkpoints are: names that tell steps, folders, the Hub and its cache."""

import inspect
import sys
from dataclasses import FrozenInstanceError
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkpoint_files import assert_is, make, model, save
from hypothesis import given
from hypothesis import strategies as st

from nbutils.checkpoints import series, sources
from nbutils.checkpoints.sources import step_of


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("step1000", 1000), ("checkpoint-300000", 300_000), ("step1000-tokens4B", 1000), ("step_20k", 20_000),
        ("step-1.5M", 1_500_000), ("global_step500", 500), ("iter_0001000", 1000), ("000250", 250), ("20k", 20_000),
        ("stage1-step1000-tokens3B", 1000), ("multiberts-seed_3-step_1700k", 1_700_000), ("epoch=3-step=1200", 1200),
        ("TinyLlama-1.1B-intermediate-step-50K-105b", 50_000), ("ckpt_007", 7), ("step0", 0), ("Step5", 5),
        ("step1000tokens4B", 1000), ("checkpoint-3-step-10", 10), ("steps_40", 40), ("checkpoint-5.safetensors", 5),
        ("step1.5", None), ("step1-step2", None), ("seed_3", None), ("main", None), ("model-00001-of-00003", None),
        ("gpt2-small-x21", None), ("footstep3", None), ("step20kb", None), ("2024-05-01", None), ("", None),
        ("step1_000_seed2", 1000), ("step5_12", 5), ("ckpt_007_500", 7), ("step7_224px", 7), ("1,500.5k", 1_500_500),
    ],
)  # fmt: skip
def test_step_of(name, step):
    assert step_of(name) == step


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("Step1000", 1000), ("STEP_7", 7), ("Checkpoint-5", 5), ("Iter_20k", 20_000), ("ep0-ba100", 100),
        ("ep12-ba3400-rank0", 3400), ("ba100", 100), ("batch_64", None), ("model_100", 100), ("model-100", 100),
        ("Model_100", 100), ("1000steps", 1000), ("1000_steps", 1000), ("20k-steps", 20_000), ("1000step", 1000),
        ("run_1,000steps", 1000), ("model_step_100", 100), ("epoch_3-step_100", 100), ("epoch3_1000steps", 1000),
        ("checkpoint_1_100", 100), ("checkpoint_1_1600", 1600), ("checkpoint_12_345", 345), ("checkpoint_2_1000", 1000),
        ("checkpoint_1_000", 1000), ("checkpoint-1_100", 1100), ("checkpoint_1_000_000", 1_000_000),
        ("checkpoint1", None), ("checkpoint25", None), ("checkpoint_best", None), ("checkpoint_last", None),
        ("checkpoint20k", 20_000), ("model_7b", None), ("model_350M", None), ("model100", None), ("model", None),
        ("llama3-step", None), ("two_stepsize", None), ("ep3", None), ("base100", None), ("step10-ba20", 10),
        ("1000stepsize", None),
    ],
)  # fmt: skip
def test_step_of_names_of_other_tools(name, step):
    assert step_of(name) == step


@given(
    st.integers(0, 10**12),
    st.sampled_from(["step{}", "checkpoint-{}", "global_step{}", "iter_{:010d}", "{}", "step={}"]),
)
def test_every_step_is_read_back(step, form):
    assert step_of(form.format(step)) == step


@given(
    st.integers(0, 10**12),
    st.sampled_from("_,"),
    st.sampled_from(
        ["step{}", "checkpoint-{}", "global_step{}", "{}", "step={}", "step_{}-tokens4B", "epoch=1-step={}"]
    ),
)
def test_every_step_in_groups_of_three_is_read_back(step, mark, form):
    assert step_of(form.format(f"{step:,}".replace(",", mark))) == step


@given(st.integers(0, 10**6), st.sampled_from([("k", 3), ("M", 6), ("b", 9)]), st.integers(0, 3))
def test_a_step_in_thousands_millions_and_billions_is_read_back(digits, unit, places):
    """digits/10^places of the unit: 1.25M is 1,250,000."""
    letter, zeros = unit
    written = f"{digits // 10**places}.{digits % 10**places:0{places}}" if places else str(digits)
    assert step_of(f"step{written}{letter}") == digits * 10 ** (zeros - places)


def test_checkpoints_of_lightning(tmp_path):
    states = {step: model(step) for step in (100, 200, 300)}
    for epoch, (step, state) in enumerate(states.items()):
        saved = {"epoch": epoch, "global_step": step, "state_dict": state, "optimizer_states": [{"state": {}}]}
        torch.save(saved, tmp_path / f"epoch={epoch}-step={step}.ckpt")
    assert_is(series(tmp_path).table, states)
    assert_is(series(tmp_path / "epoch=1-step=200.ckpt").table, {200: states[200]})


@pytest.mark.parametrize("name", ["epoch_{}", "epoch={}.ckpt", "ep{}", "checkpoint{}"])
def test_epochs_are_not_steps(tmp_path, name):
    for epoch in (1, 2):
        place = tmp_path / name.format(epoch)
        save(model(epoch), place) if place.suffix != ".ckpt" else torch.save(model(epoch), place)
    with pytest.raises(ValueError, match=r"no step \(epochs are not steps; rename, such as step500,"):
        series(tmp_path)


def test_a_folder_above_a_series_is_told_which_it_is(tmp_path):
    make(tmp_path / "mine")
    make(tmp_path / "one", steps=(7,))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError) as error:
        series(tmp_path)
    assert str(error.value).endswith(f"step_20k; it has folders that hold series: {tmp_path}/mine, {tmp_path}/one")


def test_several_folders_are_one_series(tmp_path):
    states = make(tmp_path)
    assert_is(series([tmp_path / f"step{step}" for step in (30, 0, 20, 10)]).table, states)


def test_weights_one_folder_deeper_and_a_final_copy_without_step(tmp_path):
    states = make(tmp_path, label="checkpoint-{}/hf")
    save(states[30], tmp_path)
    result = series(tmp_path)
    assert_is(result.table, states)
    assert [s.label for s in result.skipped] == [str(tmp_path)]


def test_match_chooses(tmp_path):
    states = make(tmp_path, label="stage1-step{}")
    save(model(5), tmp_path / "stage2-step10")
    assert_is(series(tmp_path, match="stage1-*").table, states)
    (skip,) = series(tmp_path).skipped
    assert "step 10 is" in skip.why and "other weights" in skip.why


def test_what_does_not_match_ends_nothing(tmp_path):
    states = {step: model(step) for step in (1, 2, 3)}
    for step, name in ((1, "run-step1"), (2, "other-step2"), (3, "run-step3")):
        save(states[step], tmp_path / name)
    del states[2]
    assert_is(series(tmp_path, match="run*").table, states)


def test_only_a_few_checkpoints_are_open_at_a_time(tmp_path):
    """The latest two, and the one that all others are compared with."""
    make(tmp_path, steps=range(6))
    found, _ = sources.find(tmp_path)
    opener = sources.Opener(keep=True)
    opener.pinned = found[0].label
    for checkpoint in found:
        opener(checkpoint)
    assert list(opener.opened) == [found[i].label for i in (0, 4, 5)]


def test_the_network_going_away_loses_nothing(hub, tmp_path, monkeypatch):
    states, out = make(tmp_path / "plain"), tmp_path / "norms.csv"
    for step, state in states.items():
        hub.add("lab/model", f"step{step}", state)
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    plain = huggingface_hub.hf_hub_download

    def down(repo, name, revision, local_dir=None):
        if revision == "step20-commit":
            raise LocalEntryNotFoundError("An error happened while trying to locate the file on the Hub")
        return plain(repo, name, revision, local_dir)

    with (
        monkeypatch.context() as patch,
        pytest.raises(ConnectionError, match="lab/model@step20: cannot get its weights"),
    ):
        patch.setattr(huggingface_hub, "hf_hub_download", down)
        series("lab/model", out=out)
    assert len(out.read_text().splitlines()) == 3
    hub.fetched.clear()
    assert_is(series("lab/model", out=out).table, states)
    assert "step0-commit" not in [revision for revision, _ in hub.fetched]


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """``hub.add(repo, revision, state)``; ``hub.fetched`` lists the downloads."""
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError

    root, repos, fetched = tmp_path / "hub", {}, []

    def add(repo, revision, state, commit=None, name="model.safetensors"):
        commit = commit or f"{revision}-commit"
        repos.setdefault(repo, {})[revision] = commit
        if name.endswith(".bin"):
            (root / repo / commit).mkdir(parents=True)
            torch.save(state, root / repo / commit / name)
        elif state is not None:
            save(state, root / repo / commit, name)

    class Api:
        def list_repo_refs(self, repo):
            if repo not in repos:
                raise RepositoryNotFoundError(
                    "404", response=SimpleNamespace(headers={}, request=None, status_code=404)
                )
            refs = [SimpleNamespace(name=name, target_commit=commit) for name, commit in repos[repo].items()]
            return SimpleNamespace(branches=refs, tags=[])

        def list_repo_files(self, repo, revision):
            folder = root / repo / revision
            return [f.name for f in folder.iterdir()] if folder.exists() else ["README.md"]

    def download(repo, name, revision, local_dir=None):
        source = root / repo / revision / name
        if not source.exists():
            raise EntryNotFoundError("404")
        fetched.append((revision, name))
        if local_dir is None:
            return str(source)
        (local_dir / name).write_bytes(source.read_bytes())
        return str(local_dir / name)

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    return SimpleNamespace(add=add, fetched=fetched, root=root)


def test_downloads_are_kept_unless_it_is_said_otherwise():
    assert inspect.signature(series).parameters["keep"].default is True


@pytest.mark.parametrize("keep", [True, False])
def test_revisions_of_a_repository(hub, tmp_path, keep, monkeypatch):
    monkeypatch.setattr(sources.tempfile, "tempdir", str(tmp_path))
    states = make(tmp_path / "plain", steps=(0, 512, 1000, 20_000))
    hub.add("lab/model", "main", states[20_000])
    for step, state in reversed(states.items()):
        hub.add("lab/model", f"step{step}", state)
    hub.add("lab/model", "step4000", None)
    result = series("lab/model", keep=keep)
    assert_is(result.table, states)
    assert sorted(s.label for s in result.skipped) == ["lab/model@main", "lab/model@step4000"]
    assert not list(tmp_path.glob("nbutils-*")), "downloads are deleted"
    counts = [sum(revision == f"step{step}-commit" for revision, _ in hub.fetched) for step in states]
    assert counts == [1, 1, 1, 1], "each revision is fetched once"


def test_an_adapter_on_the_hub_is_told(hub, tmp_path):
    states = make(tmp_path / "plain", steps=(0, 10))
    for step, state in states.items():
        hub.add("lab/model", f"step{step}", state)
    hub.add("lab/model", "step20", {"lora_A.weight": torch.ones(2, 8)}, name="adapter_model.safetensors")
    result = series("lab/model")
    assert_is(result.table, states)
    (skip,) = result.skipped
    assert skip.label == "lab/model@step20" and "only an adapter: merge it" in skip.why


def test_a_hub_series_goes_on_without_downloads(hub, tmp_path):
    states, out = make(tmp_path / "plain"), tmp_path / "norms.csv"
    for step, state in states.items():
        hub.add("lab/model", f"step{step}", state)
    first = series("lab/model", out=out)
    hub.fetched.clear()
    assert series("lab/model", out=out).table.equals(first.table) and not hub.fetched
    states[40] = model(40)
    hub.add("lab/model", "step40", states[40])
    assert_is(series("lab/model", out=out).table, states)
    assert {revision for revision, _ in hub.fetched} == {"step30-commit", "step40-commit"}


def test_several_repositories_and_pinned_revisions(hub, tmp_path):
    states = make(tmp_path / "plain", steps=(0, 20_000, 40_000))
    for step, state in states.items():
        hub.add(f"lab/bert-seed_0-step_{step // 1000}k", "main", state, name="pytorch_model.bin")
    assert_is(series([f"lab/bert-seed_0-step_{k}k" for k in (20, 0, 40)]).table, states)
    hub.add("lab/model", "step7", states[0])
    assert list(series("lab/model@step7").table.step) == [7]


def test_branches_with_equal_weights_or_commits_are_reported(hub, tmp_path):
    states = make(tmp_path / "plain")
    for step, state in states.items():
        hub.add("lab/model", f"step{step}", state)
    hub.add("lab/model", "step35", states[30])
    hub.add("lab/model", "step37", None, commit="step30-commit")
    result = series("lab/model")
    assert_is(result.table, states)
    assert sorted(d.label for d in result.duplicates) == ["lab/model@step35", "lab/model@step37"]


def test_cache_of_the_hub_is_a_source(tmp_path):
    root, states = tmp_path / "models--lab--model", make(tmp_path / "plain")
    for step, state in states.items():
        save(state, root / "snapshots" / f"hash{step}")
        (root / "refs").mkdir(exist_ok=True)
        (root / "refs" / f"step{step}").write_text(f"hash{step}")
    assert_is(series(root).table, states)


def test_no_such_repository_and_no_network(hub, monkeypatch):
    with pytest.raises(FileNotFoundError, match="lab/none: no such folder; and as a repository: not on the Hub"):
        series("lab/none")
    import huggingface_hub

    class Down:
        def list_repo_refs(self, repo):
            raise OSError("Name or service not known")

    monkeypatch.setattr(huggingface_hub, "HfApi", Down)
    with pytest.raises(
        ConnectionError,
        match=r"no such folder; and as a repository: cannot get .*service not known.*cache",
    ):
        series("lab/model")


def test_a_folder_of_a_step_may_hold_one_that_names_it_too(tmp_path):
    states = make(tmp_path, label="step{0}/iter_{0}")
    save(states[30], tmp_path / "final" / "hf")
    result = series(tmp_path)
    assert_is(result.table, states)
    assert [skip.label for skip in result.skipped] == [str(tmp_path / "final" / "hf")]


def test_a_cached_repository_whose_name_tells_its_step(tmp_path):
    """One repository for each checkpoint; its own revisions, where it has such, count first."""

    def cache(repository, **revisions):
        for ref, state in revisions.items():
            root = tmp_path / f"models--lab--{repository}"
            save(state, root / "snapshots" / f"hash-{ref}")
            (root / "refs").mkdir(exist_ok=True)
            (root / "refs" / ref).write_text(f"hash-{ref}")
        return root

    states = make(tmp_path / "plain", steps=(10, 20, 30))
    single = [cache(f"model-step{step}", main=state) for step, state in states.items()]
    assert_is(series(single).table, states)
    whole = cache("model-step40", main=model(9), **{f"step{step}": state for step, state in states.items()})
    assert_is(series(whole).table, states)
    nameless = cache("model", main=model(9))
    assert not sources._cached(nameless)


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        (["model.safetensors", "pytorch_model.bin", "README.md"], ["model.safetensors"]),
        (["pytorch_model.bin", "optimizer.bin", "other.bin"], ["pytorch_model.bin"]),
        (["a-1-of-2.safetensors", "model.safetensors.index.json", "a-2-of-2.safetensors", "pytorch_model.bin"],
         ["a-1-of-2.safetensors", "model.safetensors.index.json", "a-2-of-2.safetensors"]),
        (["x-1-of-1.bin", "pytorch_model.bin.index.json", "config.json"],
         ["x-1-of-1.bin", "pytorch_model.bin.index.json"]),
        (["sub/model.safetensors", "w.bin", "scheduler.bin", "training_args.bin", "rng_state.bin"], ["w.bin"]),
        (["adapter_model.safetensors", "README.md"], "only an adapter"), (["README.md"], "no .safetensors and no .bin"),
        ([], "no .safetensors and no .bin"), (["sub/model.safetensors"], "no .safetensors and no .bin"),
    ],
)  # fmt: skip
def test_which_files_of_a_repository_are_fetched(names, wanted):
    if isinstance(wanted, list):
        assert sources._wanted(names) == wanted
    else:
        with pytest.raises(sources.ReadError, match=wanted):
            sources._wanted(names)


def test_reading_the_hub_without_its_package_says_which(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConnectionError, match="needs the package huggingface_hub"):
        series("lab/model")


@pytest.mark.parametrize(
    ("error", "said"), [(OSError(), r"\(OSError: \)"), (OSError("one.\ntwo"), r"\(OSError: one\)")]
)
def test_an_answer_of_the_hub_is_told_by_its_first_line(hub, monkeypatch, error, said):
    import huggingface_hub

    class Down:
        def list_repo_refs(self, repo):
            raise error

    monkeypatch.setattr(huggingface_hub, "HfApi", Down)
    with pytest.raises(ConnectionError, match=said):
        series("lab/model")


def test_a_revision_that_is_gone_is_skipped_and_read_errors_stay_what_they_are(hub, tmp_path):
    states = make(tmp_path / "plain", steps=(1, 2))
    for step, state in states.items():
        hub.add("lab/model", f"step{step}", state)
    hub.add("lab/model", "step3", states[2])
    (hub.root / "lab/model" / "step3-commit" / "model.safetensors").rename(
        hub.root / "lab/model" / "step3-commit" / "notes.txt"
    )
    result = series("lab/model")
    assert_is(result.table, states)
    assert [str(skip) for skip in result.skipped] == ["lab/model@step3: no .safetensors and no .bin file in it"]


def test_a_step_that_holds_two_folders_of_weights_is_none_and_one_is_taken(tmp_path):
    states = make(tmp_path, steps=(1, 2))
    for inner in ("a", "b"):
        save(model(3), tmp_path / "step3" / inner)
    save(model(4), tmp_path / "step4" / "only")
    (tmp_path / "step4" / "logs").mkdir()
    result = series(tmp_path)
    assert sorted(set(result.table.step)) == [1, 2, 4] and len(result.skipped) == 1
    assert "step3" in result.skipped[0].label + result.skipped[0].why
    assert_is(result.table, states | {4: model(4)})


def test_a_snapshot_without_a_reference_is_known_by_its_own_name(tmp_path):
    root, states = tmp_path / "models--lab--model", {step: model(step) for step in (5, 6)}
    for step, state in states.items():
        save(state, root / "snapshots" / f"step{step}")
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text("step6")
    save(model(9), root / "snapshots" / "hash")
    (root / "refs" / "gone").write_text("not there")
    assert [name for name, _ in sources._cached(root)] == ["hash", "step5"]


def test_what_says_its_own_place_is_not_told_it_twice():
    assert str(sources.Skip("x/step1", "x/step1/w.bin: broken")) == "x/step1/w.bin: broken"
    assert str(sources.Skip("x/step1", "empty")) == "x/step1: empty"


def test_where_a_checkpoint_is_loaded_from():
    here = sources.Checkpoint(1, "step1", "", place=Path("/a/step1"), commit="c")
    assert here.pretrained == {"pretrained_model_name_or_path": "/a/step1"} and here.key == ("step1", "")
    there = sources.Checkpoint(1, "label", "stamp", repo="a/b", commit="c", resolved="real")
    assert there.pretrained == {"pretrained_model_name_or_path": "a/b", "revision": "c"}
    assert there.key == ("real", "stamp")


@pytest.mark.parametrize("name", ["no/such/place", "./-x/y", "x y/z", "nothing", "lab/model@", "./lab/model"])
def test_what_is_no_place_and_no_repository_is_told(name):
    with pytest.raises(FileNotFoundError, match="no such folder, and no name of a Hub repository"):
        sources.find(name)


def test_a_checkpoint_that_was_found_does_not_change():
    with pytest.raises(FrozenInstanceError):
        sources.Checkpoint(1, "step1", "stamp").step = 2
