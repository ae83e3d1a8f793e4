"""README, environment.yml, pyproject, constraints and CITATION agree."""

import os
import re
import shlex
import subprocess
import sys
import tomllib
import zipfile

import pytest
import yaml
from cffconvert.cli.create_citation import create_citation

from nbutils import devices, profiles
from normgrowth.__main__ import main, parser
from workflow import ROOT, book

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def norm(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def names(requirements):
    """Names of packages; an extra of our own stands for what it has."""
    found = set()
    for requirement in requirements:
        ours = re.fullmatch(r"norm-growth\[(\w+)\]", requirement)
        mine = PROJECT["optional-dependencies"][ours[1]] if ours else ()
        found |= names(mine) if ours else {norm(re.match(r"[\w.-]+", requirement)[0])}
    return found


def pins():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines), "a pin is name==version, without local labels"
    return {norm(line.split("==")[0]): line.split("==")[1] for line in lines}


def pip_section():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    return next(entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict))


def test_constraints_pin_all_that_the_project_names():
    extras = PROJECT["optional-dependencies"]
    assert set(extras) == {"plot", "chapters", "book", "test", "offline-models", "hub", "bench", "compiled"}
    wanted = names(PROJECT["dependencies"]).union(*(names(extra) for extra in extras.values()))
    assert wanted <= set(pins()) and pins()["torch"] == "2.13.0"


def test_environment_yml_is_the_same_environment():
    listed = dict(entry.split("==") for entry in pip_section() if "==" in entry)
    assert set(listed) == names(PROJECT["dependencies"]) | names(PROJECT["optional-dependencies"]["book"])
    assert {name: pins()[name] for name in listed} == listed
    assert "--constraint constraints.txt" in pip_section() and "--editable ." in pip_section()


DOCUMENTS = (*ROOT.glob("*.md"), ROOT / "book" / "running.md", ROOT / "maintenance" / "README.md")
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

    url = yaml.safe_load((ROOT / "_config.yml").read_text())["repository"]["url"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert nbutils.__version__ == PROJECT["version"] == citation["version"]
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
        assert all((ROOT / script).exists() for script in re.findall(r"(?<![\w./])\.ci/[\w-]+", steps))


@pytest.mark.parametrize(("gpus", "binder", "profile"), [(0, 0, "book"), (0, 1, "smoke"), (1, 0, "gpu")])
def test_auto_is_small_on_binder(gpus, binder, profile, monkeypatch):
    monkeypatch.setattr(devices, "cuda_count", lambda: gpus)
    monkeypatch.delenv("BINDER_LAUNCH_HOST", raising=False)
    if binder:
        monkeypatch.setenv("BINDER_LAUNCH_HOST", "https://mybinder.org/")
    assert profiles.resolve("auto") == profile


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
    assert len(examples) == 5
    for example in examples:
        exec(compile(example, "README.md", "exec"), {})
    (tmp_path / "sentences.txt").write_text("A sentence of yours.\nAnd another one.\n")
    commands = re.findall(r"^nbutils (.+)$", (ROOT / "README.md").read_text(), re.M)
    for command in commands:
        understood = parser().parse_args(command.split())
        assert "EleutherAI/" in command or main(command.split()) == 0, understood
    sizes = [(tmp_path / name).stat().st_size for name in ("norms.png", "report.html")]
    assert len(commands) == 6 and min(sizes) > 10_000
    assert len((tmp_path / "norms.csv").read_text().splitlines()) > 8  # two steps, by layer


def python(code, folder, path):
    """What a program leaves that is run in a folder, with modules of ``path``."""
    environment = {**os.environ, "PYTHONPATH": str(path)}
    return subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True)


ALONE = """
import sys, torch

class Without:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] in {blocked!r} else self.finder.find_spec(name, path, target)

sys.meta_path[:] = map(Without, sys.meta_path)
from normgrowth.__main__ import main
assert main(["norms", "runs/mine", "--by", "layer"]) == 0
assert main(["norms", "runs/mine", "--plot", "norms.png"]) == 2
from normgrowth import fits, heads, homogeneity, saturation
from normgrowth.norms import NormTracker
model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())
optimizer = torch.optim.SGD(model.parameters(), 0.1)
tracker = NormTracker(model.named_parameters())
tracker.attach(optimizer)
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
assert tracker.steps == 1 and homogeneity.degree(model, torch.ones(1, 2)) == 1
"""


def test_ones_own_models_need_the_base_alone(tmp_path):
    """Neither notebooks nor plots nor ``transformers``: the packages of all extras are not there to import."""
    tiny_gpt2(tmp_path / "runs" / "mine" / "step1", 1)
    extras = PROJECT["optional-dependencies"]
    blocked = set().union(*map(names, extras.values())) - names(PROJECT["dependencies"])
    blocked |= {"IPython", "sklearn", "huggingface_hub"}
    code = ALONE.format(blocked={name.replace("-", "_") for name in blocked} - {"psutil", "pyyaml"})
    done = python(code, tmp_path, ROOT)
    assert done.returncode == 0, done.stderr[-1500:]
    assert "pip install matplotlib" in done.stderr and "total" in done.stdout


def test_wheel_carries_what_a_chapter_reads(tmp_path):
    """On Colab there is no checkout: data and style come from the wheel; and types for who checks."""
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("norm_growth-*.whl")
    assert "nbutils/py.typed" in zipfile.ZipFile(wheel).namelist()
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = (
        "from nbutils import data, figures; figures.use_style(); print(data.__file__, len(data.published('t5_norm')))"
    )
    done = python(code, tmp_path, tmp_path / "site")
    place, rows = done.stdout.split()
    assert place.startswith(str(tmp_path)) and rows == "104"
