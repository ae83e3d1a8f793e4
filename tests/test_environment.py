"""README, environment.yml, pyproject, constraints and CITATION agree."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib

import pytest
import yaml
from cffconvert.cli.create_citation import create_citation

from nbutils import devices, profiles
from nbutils.experiments import packaged
from normgrowth.__main__ import main, parser
from workflow import ROOT, book

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def norm(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def names(requirements):
    """Names of packages; extras of our own stand for what they have."""
    packages = set()
    for requirement in requirements:
        ours = re.fullmatch(r"norm-growth\[([\w,-]+)\]", requirement)
        if ours:
            for extra in ours[1].split(","):
                packages |= names(PROJECT["optional-dependencies"][extra])
        else:
            packages.add(norm(re.match(r"[\w.-]+", requirement)[0]))
    return packages


def pins():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines), "a pin is name==version, without local labels"
    return {norm(line.split("==")[0]): line.split("==")[1] for line in lines}


def pip_section():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    return next(entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict))


def test_constraints_pin_all_that_the_project_names():
    extras = PROJECT["optional-dependencies"]
    assert set(extras) == {
        "plot", "fast", "chapters", "book", "test", "offline-models", "hub", "bench", "compiled",
    }  # fmt: skip
    wanted = names(PROJECT["dependencies"]).union(*(names(extra) for extra in extras.values()))
    assert wanted <= set(pins()) and pins()["torch"] == "2.13.0"


INSTALL_MODELS = "--no-deps --requirement trained-models.txt"


def test_each_way_to_an_environment_brings_the_trained_models_of_the_catalogue():
    """Or says the command, as the list of conda."""
    lines = (ROOT / "trained-models.txt").read_text().splitlines()
    listed = [line for line in lines if not line.startswith("#")]
    assert sorted(listed) == sorted(package for model in packaged.MODELS.values() for package in model.packages)
    assert {name: pins()[name] for name in names(listed)} == dict(line.split("==") for line in listed)
    for file in ("Makefile", ".ci/upgrades", "environment.yml", "CONTRIBUTING.md"):
        assert INSTALL_MODELS in (ROOT / file).read_text(), file
    tools = {tool for model in packaged.MODELS.values() for tool in model.tools}
    assert tools == names(PROJECT["optional-dependencies"]["offline-models"])


def test_environment_yml_is_the_same_environment():
    listed = dict(entry.split("==") for entry in pip_section() if "==" in entry)
    extras = PROJECT["optional-dependencies"]
    assert set(listed) == names(PROJECT["dependencies"]) | names(extras["book"]) | names(extras["offline-models"])
    assert {name: pins()[name] for name in listed} == listed
    assert "--constraint constraints.txt" in pip_section() and "--editable ." in pip_section()


PAGES = ("book/running.md", "book/cluster.md", "maintenance/README.md")
DOCUMENTS = (*ROOT.glob("*.md"), *(ROOT / page for page in PAGES))
COMMAND = re.compile(r"(?:^|`)((?:make|\.venv/bin/python) [^`\n#&]+)", re.M)
COMMANDS = sorted(
    {command for file in DOCUMENTS for command in COMMAND.findall(file.read_text()) if "…" not in command}
)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_of_the_documents_exist(command):
    """Of make, whether it knows what to do; of tests, whether there are some; of the workflow, its options."""
    words = shlex.split(command)
    if "pytest" in words:
        assert words[1:3] == ["-m", "pytest"] and (ROOT / words[3]).is_file()
        known = " ".join(book.chapters()) + (ROOT / words[3]).read_text()
        assert "-k" not in words or words[words.index("-k") + 1] in known
        return
    words = [words[0], "--dry-run", *words[1:]] if words[0] == "make" else [sys.executable, *words[1:4], "--help"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-500:]


def test_versions_and_urls_agree_and_the_citation_is_valid():
    import nbutils
    import normgrowth

    url = yaml.safe_load((ROOT / "_config.yml").read_text())["repository"]["url"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert nbutils.__version__ == normgrowth.__version__ == PROJECT["version"] == citation["version"]
    assert citation["repository-code"] == url and url in (ROOT / "README.md").read_text()
    create_citation(str(ROOT / "CITATION.cff"), None).validate()


def test_tracked_files_are_small_and_carry_no_machine_paths():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    for name in filter(None, listed.split("\0")):
        path = ROOT / name
        if path.is_file():
            assert path.stat().st_size < 1_000_000, name
            assert str(ROOT).encode() + b"/" not in path.read_bytes(), name


def test_each_script_and_target_that_a_job_of_the_host_names_is_there():
    for file in (ROOT / ".github" / "workflows").glob("*.yml"):
        jobs = yaml.safe_load(file.read_text())["jobs"]
        steps = "\n".join(step.get("run", "") for job in jobs.values() for step in job["steps"])
        for folder, target in re.findall(r"(?:^|\s)make (?:-C (\S+) )?([a-z-]+)", steps):
            assert re.search(rf"^{target}:", (ROOT / folder / "Makefile").read_text(), re.M), target
        assert all((ROOT / script).exists() for script in re.findall(r"(?<![\w./])\.ci/[\w-]+(?:\.py)?", steps))


@pytest.mark.parametrize(("gpus", "binder", "profile"), [(0, 0, "book"), (0, 1, "smoke"), (1, 0, "gpu")])
def test_auto_is_small_on_binder(gpus, binder, profile, monkeypatch):
    monkeypatch.setattr(devices, "cuda_count", lambda: gpus)
    monkeypatch.delenv("BINDER_LAUNCH_HOST", raising=False)
    if binder:
        monkeypatch.setenv("BINDER_LAUNCH_HOST", "https://mybinder.org/")
    assert profiles.resolve("auto") == profile


NOT_ON_A_GPU_MACHINE = (
    "axe_playwright_python", "bs4", "cffconvert", "jsonschema", "jupyter_book", "jupytext", "myst_nb", "nbformat",
    "papermill", "playwright", "pybtex", "snakemake", "sphinx",
)  # fmt: skip


def test_tests_on_a_gpu_are_collected_without_a_browser_and_what_makes_notebooks_and_pages():
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({NOT_ON_A_GPU_MACHINE})); import pytest; sys.exit(pytest.main())"
    )
    words = [sys.executable, "-c", code, "-q", "-p", "no:cacheprovider", "-m", "gpu and not slow", "--collect-only"]
    done = subprocess.run([*words, "tests"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-1500:]
    assert "test_training_on_cuda_is_that_on_the_cpu" in done.stdout


def tiny_gpt2(folder, seed):
    """What a trainer leaves: weights, configuration and tokenizer."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_only = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        ends = {"bos_token_id": None, "eos_token_id": None}
        model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=64, n_embd=16, n_layer=2, n_head=2, **ends))
    for part in (model, PreTrainedTokenizerFast(tokenizer_object=bytes_only)):
        part.save_pretrained(folder)


def test_readme_examples_run(tmp_path, monkeypatch):
    for step in (1000, 2000):
        folder = tmp_path / "runs" / "mine" / f"step{step}"
        folder.mkdir(parents=True)
        tiny_gpt2(folder, step)
    monkeypatch.chdir(tmp_path)
    examples = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert len(examples) == 7
    for example in examples:
        exec(compile(example, "README.md", "exec"), {})
    (tmp_path / "sentences.txt").write_text("A sentence of yours.\nAnd another one.\n")
    commands = re.findall(r"^normgrowth (.+)$", (ROOT / "README.md").read_text(), re.M)
    for command in commands:
        understood = parser().parse_args(command.split())
        assert "EleutherAI/" in command or main(command.split()) == 0, understood
    sizes = [(tmp_path / name).stat().st_size for name in ("norms.png", "report.html")]
    assert len(commands) == 8 and min(sizes) > 10_000
    assert len((tmp_path / "norms.csv").read_text().splitlines()) > 8  # two steps, by layer


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder with the wheel in it, as pip installs it without anything else."""
    folder = tmp_path_factory.mktemp("site")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), str(ROOT)]
    subprocess.run(install, check=True, capture_output=True)
    return folder


def python(code, folder, path):
    """What a program leaves that is run in a folder, with modules of ``path``."""
    environment = {**os.environ, "PYTHONPATH": str(path)}
    return subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True)


ALONE = """
import importlib, pkgutil, sys, torch

class Without:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] in {blocked!r} else self.finder.find_spec(name, path, target)

sys.meta_path[:] = map(Without, sys.meta_path)
import normgrowth
assert normgrowth.__file__.startswith({site!r})
modules = [module.name for module in pkgutil.walk_packages(normgrowth.__path__, "normgrowth.")]
assert len(modules) > 30 and all(map(importlib.import_module, modules))
from normgrowth.__main__ import main
assert main(["norms", "runs/mine", "--by", "layer", "--out", "norms.csv"]) == 0
assert main(["norms", "runs/mine", "--plot", "norms.png"]) == 2
assert main(["degree", "runs/mine/step1"]) == 2
from normgrowth import homogeneity
from normgrowth.norms import NormTracker, kernels
model = torch.nn.Sequential(torch.nn.Linear(2, 64), torch.nn.ReLU())  # so many that some unit is on
optimizer = torch.optim.SGD(model.parameters(), 0.1)
tracker = NormTracker(model.named_parameters())
tracker.attach(optimizer)
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
assert tracker.steps == 1 and tracker.identity_error() < 1e-12 and kernels.loops() is kernels.BY_BLOCKS
assert homogeneity.degree(model, torch.ones(1, 2)) == 1
"""


def test_ones_own_models_need_the_base_alone(site, tmp_path):
    """Without nbutils, and without the packages of all extras: notebooks, plots, numba, ``transformers``."""
    for step in (1, 2):
        tiny_gpt2(tmp_path / "runs" / "mine" / f"step{step}", step)
    shutil.copytree(site / "normgrowth", tmp_path / "alone" / "normgrowth")
    extras = PROJECT["optional-dependencies"]
    blocked = set().union(*map(names, extras.values())) - names(PROJECT["dependencies"])
    blocked |= {"IPython", "sklearn", "huggingface_hub", "nbutils", "workflow", "maintenance", "tests"}
    blocked = {name.replace("-", "_") for name in blocked} - {"psutil", "pyyaml"}
    done = python(ALONE.format(blocked=blocked, site=str(tmp_path / "alone")), tmp_path, tmp_path / "alone")
    assert done.returncode == 0, done.stderr[-1500:]
    assert "pip install matplotlib" in done.stderr and "pip install 'transformers[torch]'" in done.stderr
    assert "2 checkpoints, steps 1 to 2" in done.stdout
    assert len((tmp_path / "norms.csv").read_text().splitlines()) > 8  # two steps, by layer


def test_wheel_carries_what_a_chapter_reads(site, tmp_path):
    """On Colab there is no checkout: data, style, sentences and the report's page come from the wheel; and types."""
    assert {file.name for file in site.iterdir() if "norm_growth" not in file.name} == {"bin", "nbutils", "normgrowth"}
    assert {file.name for file in (site / "bin").iterdir()} == {"nbutils", "normgrowth"}
    assert all((site / package / "py.typed").is_file() for package in ("nbutils", "normgrowth"))
    code = (
        "from nbutils import data, figures; figures.use_style(); print(data.__file__, len(data.published('t5_norm')));"
        "from normgrowth import sentences; from normgrowth.report.page import TEMPLATE;"
        "print(TEMPLATE, len(sentences.first(24)), TEMPLATE.read_text().count('$summary'))"
    )
    done = python(code, tmp_path, site)
    place, rows, page, count, fields = done.stdout.split()
    assert place.startswith(str(site)) and rows == "104"
    assert page.startswith(str(site)) and (count, fields) == ("24", "1")
