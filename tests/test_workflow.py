"""The workflow on a small copy of the project: what runs again, what a failure leaves, what a kill costs."""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from functools import partial

import psutil
import pytest
from conftest import ROOT, chapter, check, write_chapters

from nbutils import devices
from workflow import book, sources


def executed(root, seed=0):
    return root / "_build" / "smoke" / f"seed-{seed}"


def stamps(root):
    return {path.stem: path.stat().st_mtime_ns for path in executed(root).glob("*.ipynb")}


def metrics(root):
    return json.loads((root / "_build" / "smoke" / "metrics.json").read_text())


def last_line(done):
    return done.stdout.strip().splitlines()[-1]


def edit(file, old, new):
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


def write(root, code, name="01-one", **more):
    (root / "book" / f"{name}.md").write_text(chapter(name, code, **more))


def test_everything_then_nothing_then_only_what_changed(project, workflow):
    """One story, because each run builds on the one before."""
    html, one, two = (project / name for name in ("_build/smoke/html", "book/01-one.md", "book/02-two.md"))
    done = workflow(project, "--html")
    assert done.returncode == 0 and "GREEN: 2 checks hold; 2 confirmed" in done.stdout, done.stdout[-4000:]
    first, page = stamps(project), (html / "index.html").stat().st_mtime_ns
    assert set(first) == {"01-one", "02-two"}

    for path in project.rglob("*.md"):  # content decides, not time
        os.utime(path)
    edit(project / "normgrowth" / "norms" / "pieces.py", '"""', '"""Another word. ')
    done = workflow(project)
    assert done.returncode == 0 and stamps(project) == first, "nothing to do, and something ran"
    assert (html / "index.html").stat().st_mtime_ns == page

    two.write_text(two.read_text() + "\nMore prose.\n")
    (project / "normgrowth" / "norms" / "pieces.py").open("a").write("\nX = 1\n")
    assert workflow(project, "--html").returncode == 0
    second = stamps(project)
    assert second["01-one"] > first["01-one"] and second["02-two"] == first["02-two"], "only 01-one uses norms"
    assert "More prose." in (html / "02-two.html").read_text(), "prose is rendered alone"

    edit(two, "1.0, (0, 2)", "1.25, (0, 2)")
    edit(one, "1.0, (0, 2)", "5.0, (0, 2)")
    done = workflow(project, "01-one")
    assert done.returncode == 1
    assert not [name for name in ("metrics.json", "summary.md") if (html.parent / name).exists()]
    third = stamps(project)
    assert third["01-one"] > second["01-one"] and third["02-two"] == second["02-two"]
    done = workflow(project, "--html")
    assert done.returncode == 1 and "measured 5, band [0, 2]" in last_line(done), "red stays red with nothing to run"
    assert stamps(project)["02-two"] > third["02-two"] and stamps(project)["01-one"] == third["01-one"]
    for name in ("index", "01-one", "02-two", "scorecard"):
        assert "This run is red" in (html / f"{name}.html").read_text(), name


def test_one_page_alone(project, workflow):
    """Green or red, as the chapter is; and green reports of all chapters are withdrawn, as by any run of some."""
    assert workflow(project).returncode == 0
    for value, status in ((1.0, 0), (5.0, 1)):
        write(project, check(value=value) + "  # edited")
        done = workflow(project, "01-one", command="page")
        assert done.returncode == status, done.stdout[-3000:]
        (path,) = [line for line in done.stdout.splitlines() if line.startswith("To read: ")]
        assert "a number" in (project / path.removeprefix("To read: ")).read_text()
        assert not (executed(project).parent / "metrics.json").exists()


def test_a_chapter_that_is_edited_while_it_runs_has_no_result_and_no_page(project, workflow):
    """Its result was judged by nobody: neither is it run again below the judgement, nor shown."""
    edits = "n = 1\n" + EDITS.format(project).replace("07-edits", "01-one")
    for arguments, options in ((("--html",), {}), (("01-one",), {"command": "page"})):
        write(project, edits + "\n" + check())
        done = workflow(project, *arguments, **options)
        assert done.returncode == 1 and "01-one: it, or a module of it, was edited after" in last_line(done), (
            done.stdout
        )
        assert "01-one" not in stamps(project) and "To read" not in done.stdout
        assert not (executed(project).parent / "html" / "index.html").exists()


EDITS = "p = __import__('pathlib').Path('{}/book/07-edits.md')\np.write_text(p.read_text().replace('n = 1', 'n = 2'))"
TROUBLE = {  # a chapter that fails: its cell, and the reason that is given; all in one run
    "01-raises": ("# why\nx = 1\nraise ValueError('no\\nsuch')", "cell [4] x = 1 raised ValueError: no such"),
    "02-dies": ("import os\nos._exit(3)", "DeadKernelError: Kernel died"),
    "03-killed": ("import os\nos.kill(os.getppid(), 9)\nimport time\ntime.sleep(20)", "its job was killed before its"),
    "04-sleeps": ("import time\ntime.sleep(600)", "TimeUp: not finished after 30 s"),
    "05-unlisted": (check("nowhere"), "checked, but not listed in claims.yml"),
    "06-exits": ("import sys\nsys.exit(0)", "RuntimeError: a cell left the notebook before its end"),
    "07-edits": ("n = 1\n" + EDITS, "it, or a module of it, was edited after it began to run"),
}


def test_each_chapter_that_fails_is_named_leaves_the_others_and_is_repaired(project, workflow):
    sound = {name: chapter(name, check(name[3:])) for name in (*TROUBLE, "08-holds")}
    write_chapters(project, sound)
    for name, (code, _) in TROUBLE.items():
        write(project, code.format(project), name)
    (project / "book" / "errata.md").write_text("# Errata\n\n{{ no_such_claim }}\n")
    done = workflow(project, "--time-limit", "30")
    assert done.returncode == 1 and TROUBLE["01-raises"][1] in last_line(done), done.stdout[-3000:]
    run, names = metrics(project), " ".join(TROUBLE)
    assert f"make smoke SEED=0 CHAPTERS='{names}'" in done.stdout
    for name, (_, reason) in TROUBLE.items():
        assert [each for each in run["problems"] if each["chapter"] == name and reason in each["what"]], name
    # what did not end is no verdict, and what ended without its claim failed
    assert run["verdicts"] == {"unlisted": "failed", "holds": "confirmed"} and not run["run"]["green"]
    assert "Traceback" in (executed(project) / "logs" / "01-raises.ipynb").read_text()
    for name, text in sound.items():
        (project / "book" / f"{name}.md").write_text(text)
    done = workflow(project, "--html")
    assert done.returncode == 1 and "no pages" in last_line(done) and "no_such_claim" in last_line(done)
    assert not metrics(project)["run"]["green"]
    (project / "book" / "errata.md").write_text("# Errata\n\nNone.\n")
    extension = project / "workflow" / "pages" / "extension.py"
    sound_setup, planted = '    app.connect("build-finished", tidy)\n', '    raise KeyError("planted")\n'
    edit(extension, sound_setup, planted + sound_setup)
    done = workflow(project, "--html")
    assert done.returncode == 1 and "not rendered: KeyError: 'planted'" in last_line(done), done.stdout[-3000:]
    edit(extension, planted, "")
    assert workflow(project, "--html").returncode == 0, "the next run repairs it"


RECIPES = """

def _quick(*, profile, seed, device):
    import pandas as pd
    from nbutils.training import TrainingRun

    {body}
    return TrainingRun(pd.DataFrame({{"step": [0, 1], "norm": [1.0, 1.5]}}), settings={{"seed": seed}})


RECIPES = {{"quick-a": _quick, "quick-b": _quick}}
"""
LOADS = 'runs = shared_runs.load("quick-*", profile=profile, seed=seed, device=device)\n'


def test_chapters_share_a_training(project, workflow):
    """Trained once for both; not again for a new text; one that fails is named and leaves no chapter behind."""
    module = project / "nbutils" / "shared_runs" / "catalogue.py"
    recipes = module.read_text()
    module.write_text(recipes + RECIPES.format(body="pass"))
    for name in ("01-one", "02-two"):
        code = LOADS + check(name[3:], 'runs["quick-a"].history.norm.iloc[-1]')
        write(project, code, name, imports="from nbutils import shared_runs")
    assert workflow(project).returncode == 0
    kept, first = executed(project) / "trainings" / "quick-a" / "run.pt", stamps(project)
    trained = kept.stat().st_mtime_ns
    edit(project / "book" / "02-two.md", "(0, 2)", "(0, 3)")
    assert workflow(project).returncode == 0 and kept.stat().st_mtime_ns == trained
    assert stamps(project)["01-one"] == first["01-one"]
    module.write_text(recipes + RECIPES.format(body="raise KeyError('no gradient')"))
    done = workflow(project)
    reason = "not run: in the job of its trainings, quick-a: KeyError: 'no gradient'"
    assert done.returncode == 1 and done.stdout.count(reason) == 3
    assert not stamps(project) and "Traceback" in (executed(project) / "logs" / "quick-a.log").read_text()
    module.write_text(recipes + RECIPES.format(body="pass"))
    assert workflow(project).returncode == 0


def test_damaged_and_older_results_do_not_count(project, workflow):
    assert workflow(project).returncode == 0
    notebook, rules = executed(project) / "02-two.ipynb", (project / "Snakefile").read_text()
    notebook.write_text(notebook.read_text()[:300])
    (executed(project).parent / "metrics.json").write_text('{"run": {"green": tr')
    done = workflow(project)
    assert done.returncode == 1 and "02-two: its result is damaged" in last_line(done)
    assert workflow(project).returncode == 0, "and is made again"

    write(project, check(value=5.0))
    (project / "Snakefile").write_text(rules + "\nthis is no rule\n")  # it does not even start, and all there is green
    done = workflow(project)
    assert done.returncode == 1 and "01-one: no result: its job did not start" in last_line(done), done.stdout[-2000:]
    assert metrics(project)["verdicts"] == {"two": "confirmed"} and not metrics(project)["run"]["green"]

    (project / "Snakefile").write_text(rules)
    shutil.rmtree(project / ".snakemake")  # and with it all that Snakemake knows of the results
    write(project, check(value=1.5))
    edit(project / "book" / "02-two.md", "1.0, (0, 2)", "1.25, (0, 2)")
    done = workflow(project)
    assert done.returncode == 0 and metrics(project)["records"][1]["measured"] == 1.25, done.stdout[-2000:]


def kernel(folder, code):
    """A kernel specification ``python3`` that starts ``code`` in the place of a kernel."""
    target = folder / "kernels" / "python3"
    target.mkdir(parents=True)
    spec = {"argv": [sys.executable, "-c", code, "{connection_file}"], "display_name": "broken", "language": "python"}
    (target / "kernel.json").write_text(json.dumps(spec))


def test_a_kernel_that_does_not_start_and_one_of_another_environment(project, workflow, monkeypatch, tmp_path):
    kernel(tmp_path / "jupyter", "import ipykernel_is_not_installed")
    with monkeypatch.context() as broken:
        broken.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
        done = workflow(project)
    assert done.returncode == 1 and "Kernel died" in last_line(done), done.stdout[-2000:]
    assert not stamps(project)
    log = (executed(project) / "logs" / "01-one.log").read_text()
    assert "logs/01-one.log" in done.stdout and "No module named 'ipykernel_is_not_installed'" in log
    kernel(tmp_path / "data", "import of_another_environment")  # a user's own comes first in Jupyter's search
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "data"))
    assert workflow(project).returncode == 0


def alive(root):
    """Command lines of the processes that work for this copy of the project: jobs there, and kernels elsewhere."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # gone by now, or another user's
            path = process.environ().get("PYTHONPATH", "").split(os.pathsep)
            if process.status() != psutil.STATUS_ZOMBIE and (process.cwd() == str(root) or str(root) in path):
                found.append(" ".join(process.cmdline()))
    return found


SLEEPS = "import time\ntime.sleep({})\n"


def kill(project, when):
    """Start a whole run, kill it once ``when()`` has returned, and see that it leaves no writer and no half.

    False if it ended before.
    """
    words = [sys.executable, "-m", "workflow", "run", "--profile", "smoke", "--html"]
    with open(project / "killed.log", "w") as log:
        run = subprocess.Popen(words, cwd=project, stdout=log, stderr=log, start_new_session=True)
        when()
        if run.poll() is not None:
            return False
        os.kill(run.pid, signal.SIGKILL)
        run.wait()
    deadline = time.monotonic() + 10
    while (found := alive(project)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not found
    reports = executed(project).parent
    if (reports / "metrics.json").exists():  # written once all chapters are done, before the pages
        assert metrics(project)["run"]["green"] and set(stamps(project)) == {"01-one", "02-two"}
    if (reports / "html" / "index.html").exists():  # the pages come into place in one step
        assert "</html>" in (reports / "html" / "02-two.html").read_text()
    for notebook in executed(project).glob("*.ipynb"):
        json.loads(notebook.read_text())  # whole, or not there
    return True


def kill_and_repair(project, workflow, moments):
    for name in ("01-one", "02-two"):
        write(project, SLEEPS.format(2) + check(name[3:]), name)
    for moment in moments:
        subprocess.run(["rm", "-rf", "_build"], cwd=project)
        while not kill(project, partial(time.sleep, moment)):  # a machine is not equally fast each time
            moment *= 0.8
            subprocess.run(["rm", "-rf", "_build"], cwd=project)
        done = workflow(project, "--html")
        assert done.returncode == 0, f"killed after {moment} s:\n{done.stdout[-3000:]}"
        assert "</html>" in (project / "_build/smoke/html/02-two.html").read_text()
        assert metrics(project)["run"]["green"]


def test_killed_in_the_middle_and_run_again(project, workflow):
    kill_and_repair(project, workflow, [5.0])


@pytest.mark.slow
def test_killed_at_many_moments(project, workflow):
    """From the first moment to the last: one random moment in each twentieth of a whole run."""
    started = time.monotonic()
    assert workflow(project, "--html").returncode == 0
    whole, rng = time.monotonic() - started + 2, random.Random(0)
    kill_and_repair(project, workflow, [(i + rng.random()) * whole / 20 for i in range(20)])


def test_killed_over_older_green_results(project, workflow):
    """Nothing of the older run counts as the new text's: no report while it runs, and no notebook of an older text."""
    assert workflow(project).returncode == 0
    older = stamps(project)
    write(project, SLEEPS.format(30) + check(value=5.0))

    def running():
        deadline = time.monotonic() + 60
        while not (found := [words for words in alive(project) if "workflow.job" in words]):
            assert time.monotonic() < deadline, "alive() sees no job"
            time.sleep(0.1)
        assert "01-one" in found[0]
        second = workflow(project)  # in the same checkout: one clear line
        assert second.returncode == 2
        assert second.stdout.strip() == "error: another run is active in this checkout: wait for it"

    assert kill(project, running)
    assert not (executed(project) / "01-one.ipynb").exists() and stamps(project)["02-two"] == older["02-two"]
    assert not (executed(project).parent / "metrics.json").exists()
    edit(project / "book" / "01-one.md", "sleep(30)", "sleep(0)")
    done = workflow(project)
    assert done.returncode == 1 and "measured 5, band [0, 2]" in last_line(done), done.stdout[-3000:]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--profile", "huge"], "error: unknown profile 'huge': choose one of auto, smoke, book, gpu"),
        (["--device", "tpu"], "error: unknown device 'tpu': choose one of auto, cpu, cuda"),
        (["--device", "cuda"], "torch finds no CUDA device here"),
        (["--seed", "-1"], f"error: seed -1: a seed is a whole number from 0 to {2**31 - 1}"),
        (["03-nothing"], "error: unknown chapter '03-nothing': choose from 01-one, 02-two"),
    ],
)
def test_bad_arguments_say_one_line_and_touch_nothing(project, workflow, arguments, line):
    if "cuda" in arguments and devices.cuda_count():
        pytest.skip("this machine has a GPU")
    done = workflow(project, *arguments)
    assert done.returncode == 2 and line in done.stdout and len(done.stdout.splitlines()) == 1
    assert not (project / "_build").exists()


SENTENCES = "\n:::{{finding}} {}\nWe find that all is well.\n:::\n\n:::{{finding}} sound\nAnother stands.\n:::\n"
CHANCE = {  # the value by seed, its kind; the reason that is given, and whether two further seeds were run
    "01-noted": ("5.0 if seed == 0 else 1.25", "derived", "", True),
    "02-twice": ("5.0 if seed in (0, 1000003) else 1.0", "derived", "rerun: 5 at seed 1000003, 1 at", True),
    "03-exact": ("5.0 if seed == 0 else 1.0", "exact", "check does not hold: a number", False),
    "04-sound": ("1.0", "derived", "", False),
}


def test_what_fails_by_chance_is_judged_at_further_seeds(project, workflow):
    """One of three seeds is noted and shown; two of three and what is exact are red, and their sentences left out."""
    sources_of = {name: chapter(name, check(name[3:], value, kind)) for name, (value, kind, *_) in CHANCE.items()}
    write_chapters(project, {name: text + SENTENCES.format(name[3:]) for name, text in sources_of.items()})
    (project / "book" / "errata.md").write_text("# Errata\n\nNone.\n")
    done = workflow(project, "--html")
    assert done.returncode == 1 and "rerun at two other seeds:" in done.stdout, done.stdout[-3000:]
    run, reports = metrics(project), project / "_build" / "smoke"
    for name, (_, _, reason, further) in CHANCE.items():
        found = [each for each in run["problems"] if each["chapter"] == name and reason in each["what"]]
        assert bool(found) == bool(reason) == (run["verdicts"][name[3:]] == "failed"), name
        assert (executed(project, 1000003) / f"{name}.ipynb").exists() == further, name
        page = (reports / "html" / f"{name}.html").read_text()
        assert ("all is well" in page) == (not reason) and "Another stands" in page, name
        assert "is no verdict on the paper" in page, "of each page of a red run"
    (noted,) = [each for each in run["records"] if each["claim"] == "noted"]
    assert noted["noted"] and [each["measured"] for each in noted["further"]] == [1.25, 1.25]
    page = (reports / "html" / "01-noted.html").read_text()
    assert "held at two others: 1.25 at seed 1000003 and 1.25 at seed 2000006" in page and "◐" in page
    done = workflow(project, "01-noted")
    assert done.returncode == 0 and "1 noted (failed here, held at two further seeds)" in last_line(done)


def test_nothing_to_do_costs_little(smoke, whole_smoke):
    assert whole_smoke() < 5 * (1 + os.getloadavg()[0]), "five seconds on a quiet machine"


def test_what_python_loads_is_among_what_a_chapter_is_made_from():
    """The imports of each chapter, in a process of their own, against what is read from its text."""
    code = """
import ast, json, sys
for cells in json.load(sys.stdin):
    for name in [n for n in sys.modules if n.split(".")[0] in ("nbutils", "normgrowth")]:
        del sys.modules[name]
    nodes = [n for n in ast.parse(cells).body if isinstance(n, (ast.Import, ast.ImportFrom))]
    ours = [n for n in nodes if "nbutils" in ast.unparse(n) or "normgrowth" in ast.unparse(n)]
    exec(compile(ast.Module(ours, []), "imports", "exec"), {})
    print(json.dumps([n for n in sys.modules if n.split(".")[0] in ("nbutils", "normgrowth")]))
"""
    cells = json.dumps(["\n".join(book.code_cells(chapter)) for chapter in book.chapters()])
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, input=cells, cwd=ROOT, capture_output=True, text=True, check=True)
    for name, line in zip(book.chapters(), done.stdout.splitlines(), strict=True):
        loaded = set(json.loads(line)) - {"nbutils", "normgrowth"}
        assert len(loaded) > 5 and loaded <= sources.used_by(name), name


def test_the_hash_of_a_chapter_changes_with_each_thing_it_is_made_from_and_no_other(project, monkeypatch):
    write(
        project,
        "run = shared_runs.load('lm-pre-text')",
        imports="from nbutils import shared_runs\nfrom normgrowth import norms, saturation",
    )
    write(project, "x = 1", "02-two", imports="from nbutils.experiments import walks")
    monkeypatch.setattr(sources, "ROOT", project)
    monkeypatch.setattr(book, "ROOT", project)

    def hashes():
        return [sources.hash_of(name) for name in ("01-one", "02-two")]

    before = hashes()
    for file, added, changed in (
        ("book/02-two.md", "\nMore prose.\n", (False, False)),
        ("book/02-two.md", "\n```{code-cell} ipython3\nx = 2\n```\n", (False, True)),
        ("nbutils/experiments/walks.py", "\n# a remark\n", (False, False)),
        ("nbutils/experiments/walks.py", "\nEXTRA = 1\n", (False, True)),
        ("normgrowth/norms/kernels.py", "\nEXTRA = 1\n", (True, False)),  # imported by what it imports
        ("nbutils/shared_runs/recipes_t5.py", "\nEXTRA = 1\n", (True, False)),
        ("nbutils/experiments/limits.py", "\nEXTRA = 1\n", (False, False)),
        ("nbutils/claims/records.py", "\nEXTRA = 1\n", (True, True)),
        ("book/data/t5_norm.csv", "\n", (True, True)),
        ("workflow/job.py", "\nEXTRA = 1\n", (False, False)),
    ):
        with open(project / file, "a") as lines:
            lines.write(added)
        after = hashes()
        assert tuple(x != y for x, y in zip(before, after, strict=True)) == changed, (file, added)
        before = after
    edit(project / "normgrowth" / "norms" / "budget.py", '"""', '"""Another word. ')
    assert hashes() == before, "a docstring"


@pytest.mark.parametrize(
    ("cell", "why"),
    [("x = 1\n(", r"code cell 2, line 2: '\(' was never closed"), ("shared_runs.load(name)", "as a constant string")],
)
def test_a_cell_that_cannot_be_read_is_named(monkeypatch, cell, why):
    monkeypatch.setattr(book, "code_cells", lambda chapter: ["x = 1", cell])
    with pytest.raises(ValueError, match=f"01-one: .*{why}"):
        sources.trainings_of("01-one")
