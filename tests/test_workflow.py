"""The workflow on a small copy of the project: what runs again, what a failure leaves, what a kill costs."""

import contextlib
import itertools
import json
import os
import platform
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from graphlib import TopologicalSorter
from pathlib import Path

import psutil
import pytest
from conftest import CHECK, FAILS, HOLDS, ROOT, chapter

from nbutils import device
from workflow import chapters, dependencies
from workflow.stage import configuration, hosted, remote_url

TINY = "nbutils/profile.py"


def executed(root, profile="smoke"):
    return root / "_build" / profile / "seed-0"


def stamps(root):
    return {path.stem: path.stat().st_mtime_ns for path in executed(root).glob("*.ipynb")}


def test_everything_then_nothing_then_only_what_changed(project, workflow):
    """One story, because each run builds on the one before."""
    done = workflow(project, "--html")
    assert done.returncode == 0, done.stdout[-4000:]
    assert "GREEN: 2 checks hold; 2 confirmed" in done.stdout
    first, page = stamps(project), (project / "_build/smoke/html/index.html").stat().st_mtime_ns
    assert set(first) == {"01-one", "02-two"}

    done = workflow(project, "--html")
    assert done.returncode == 0 and stamps(project) == first, "nothing to do, and something ran"
    assert (project / "_build/smoke/html/index.html").stat().st_mtime_ns == page

    for path in project.rglob("*.md"):  # content decides, not time
        os.utime(path)
    workflow(project)
    assert stamps(project) == first

    norms = project / "nbutils" / "norms" / "pieces.py"
    norms.write_text(norms.read_text() + "\n# a remark\n")
    workflow(project)
    second = stamps(project)
    assert second["01-one"] > first["01-one"] and second["02-two"] == first["02-two"], "only 01-one uses norms"

    text = project / "book" / "02-two.md"
    text.write_text(text.read_text() + "\nMore prose.\n")
    done = workflow(project, "--html")
    third = stamps(project)
    assert third["02-two"] > second["02-two"] and third["01-one"] == second["01-one"]
    assert "More prose." in (project / "_build/smoke/html/02-two.html").read_text()
    assert "updated book/notebooks/02-two.ipynb" in done.stdout


def test_pages_of_an_edit_are_those_of_a_whole_rendering(project, workflow):
    """Jupyter Book makes only the changed pages anew; what comes out must be what it makes from nothing."""

    def pages():
        html = project / "_build/smoke/html"
        found = {str(p.relative_to(html)): p.read_bytes() for p in html.rglob("*") if p.is_file()}
        # Sphinx puts a checksum behind the name of a style or script that is there already when it starts
        found = {name: re.sub(rb"\.(css|js)\?v=\w+", rb".\1", text) for name, text in found.items()}
        return {name: text for name, text in found.items() if name != ".buildinfo" and not name.endswith(".inv")}

    def log():
        return (project / "_build/smoke/jupyter-book.log").read_text()

    text = project / "book" / "02-two.md"
    assert workflow(project, "--html").returncode == 0
    text.write_text(text.read_text() + "\nMore prose with a rareword.\n")
    assert workflow(project, "--html").returncode == 0
    read = re.findall(r"reading sources\.\.\. \[ *\d+%\] (\S+)", re.sub(r"\x1b\[[\d;]*m", "", log()))
    assert "02-two" in read and not {"01-one", "api", "index"} & set(read), read
    after_edit = pages()
    subprocess.run(["rm", "-rf", "_build/smoke/rendered", "_build/smoke/html"], cwd=project, check=True)
    assert workflow(project, "--html").returncode == 0
    whole = pages()
    assert after_edit.keys() == whole.keys()
    differ = [name for name in whole if whole[name] != after_edit[name]]
    assert set(differ) <= {"searchindex.js"}, differ
    assert "rareword" in after_edit["searchindex.js"].decode()

    text.write_text(text.read_text().replace("# 02-two", "# Another title"))  # it stands in each page's sidebar
    assert workflow(project, "--html").returncode == 0
    assert "Another title" in pages()["01-one.html"].decode()


def test_a_notebook_that_raises_does_not_stop_the_others(project, workflow):
    (project / "book" / "01-one.md").write_text(chapter("01-one", 'x = 1\nraise KeyError("no such thing")'))
    done = workflow(project, "--html")
    last = "\n".join(done.stdout.splitlines()[-6:])
    assert done.returncode == 1
    assert "01-one" in last and "raise KeyError" not in last.split("cell")[0]
    assert "x = 1" in last and "KeyError: 'no such thing'" in last
    assert set(stamps(project)) == {"02-two"}, "the failed notebook counts as done"
    kept = (executed(project) / "logs" / "01-one.ipynb").read_text()
    assert "Traceback" in kept and "no such thing" in kept
    metrics = json.loads((project / "_build/smoke/metrics.json").read_text())
    assert not metrics["run"]["green"] and metrics["verdicts"] == {"two": "confirmed"}
    assert 'errors="1"' in (project / "_build/smoke/junit.xml").read_text()

    (project / "book" / "01-one.md").write_text(chapter("01-one", HOLDS))
    assert workflow(project).returncode == 0, "the next run repairs it"


def test_a_failed_claim_is_rendered_and_red(project, workflow):
    code = 'claims.check("one", "too large", 3.25, (0, 2), kind="exact")\nprint("the rest still runs")'
    (project / "book" / "01-one.md").write_text(chapter("01-one", code))
    done = workflow(project, "--html")
    last = done.stdout.splitlines()[-5:]
    assert done.returncode == 1
    assert any("01-one" in line and "one" in line and "3.25" in line and "[0, 2]" in line for line in last), last
    page = (project / "_build/smoke/html/01-one.html").read_text()
    assert "the rest still runs" in page and "verdict-failed" in page
    again = workflow(project, "--html")
    assert again.returncode == 1 and "3.25" in again.stdout, "red stays red when nothing is left to run"
    assert 'failures="1"' in (project / "_build/smoke/junit.xml").read_text()


def test_a_red_chapter_alone_withdraws_the_green_reports(project, workflow):
    folder = project / "_build" / "smoke"
    assert workflow(project).returncode == 0 and (folder / "metrics.json").exists()
    (project / "book" / "01-one.md").write_text(chapter("01-one", FAILS))
    done = workflow(project, "01-one")
    assert done.returncode == 1 and "the green reports of all chapters are withdrawn" in done.stdout
    assert not [name for name in ("metrics.json", "junit.xml", "summary.md") if (folder / name).exists()]


def test_unlisted_and_unchecked_claims_are_red(project, workflow):
    (project / "book" / "01-one.md").write_text(chapter("01-one", CHECK.format("three", 1.0)))
    done = workflow(project)
    assert done.returncode == 1
    assert "checked, but not listed in claims.yml" in done.stdout and "does not check it" in done.stdout


def test_a_notebook_past_its_time_limit(project, workflow):
    (project / "book" / "01-one.md").write_text(chapter("01-one", "import time\ntime.sleep(600)"))
    done = workflow(project, "--time-limit", "40")
    assert done.returncode == 1 and "not finished after 40 s" in done.stdout.splitlines()[-1]
    assert set(stamps(project)) == {"02-two"}
    said = json.loads((project / "_build/smoke/metrics.json").read_text())
    assert not said["run"]["green"] and "one" not in said["verdicts"], "what did not end is no verdict"
    (project / "book" / "01-one.md").write_text(chapter("01-one", HOLDS))
    done = workflow(project)
    assert done.returncode == 0 and set(stamps(project)) == {"01-one", "02-two"}, done.stdout[-3000:]


def test_a_text_edited_while_it_runs_does_not_count(project, workflow):
    source = project / "book" / "01-one.md"
    edit = f"import pathlib\np = pathlib.Path({str(source)!r})\np.write_text(p.read_text() + 'Edited.')"
    source.write_text(chapter("01-one", edit))
    done = workflow(project)
    assert done.returncode == 1 and "changed while it ran" in "\n".join(done.stdout.splitlines()[-3:])
    assert set(stamps(project)) == {"02-two"}


def test_a_text_edited_after_its_job_and_before_the_end_does_not_count(project, workflow):
    """Its own job cannot see it: another one edits it. A report of all would mix two texts."""
    source, made = project / "book" / "01-one.md", executed(project) / "01-one.json"
    edit = f"""import pathlib, time
p, made = pathlib.Path({str(source)!r}), pathlib.Path({str(made)!r})
while not made.exists():
    time.sleep(0.1)
p.write_text(p.read_text().replace("1.0, (0, 2)", "5.0, (0, 2)"))
claims.check("two", "a number", 1.0, (0, 2), kind="exact")"""
    (project / "book" / "02-two.md").write_text(chapter("02-two", edit))
    done = workflow(project, "--jobs", "2")
    last = done.stdout.splitlines()[-1]
    assert done.returncode == 1 and "01-one: it, or a module of it, changed while the run went on" in last
    assert set(stamps(project)) == {"02-two"}
    assert not json.loads((project / "_build/smoke/metrics.json").read_text())["run"]["green"]
    done = workflow(project)
    assert done.returncode == 1 and "measured 5, band [0, 2]" in done.stdout.splitlines()[-1], "today's text is judged"


QUICK = """

def _quick(*, profile, seed, device):
    import pandas as pd
    from nbutils.training import Run

    {body}
    return Run(pd.DataFrame({{"step": [0, 1], "norm": [1.0, 1.5]}}), settings={{"seed": seed}})


RECIPES = {{"quick-a": _quick}}
"""
LOADS = """
runs = trainings.load("quick-*", profile=profile, seed=seed, device=device)
claims.check("{}", "a", runs["quick-a"].history.norm.iloc[-1], (1.4, 1.6), kind="exact")
"""


def test_chapters_share_a_training(project, workflow):
    """Trained once for both; not again for a new text; a recipe that raises is named and leaves no chapter behind."""
    module = project / "nbutils" / "trainings" / "__init__.py"
    recipes = module.read_text()
    module.write_text(recipes + QUICK.format(body="pass"))
    for name, claim in (("01-one", "one"), ("02-two", "two")):
        text = chapter(name, LOADS.format(claim), imports="from nbutils import trainings")
        (project / "book" / f"{name}.md").write_text(text)
    done = workflow(project)
    assert done.returncode == 0 and "GREEN: 2 checks hold" in done.stdout, done.stdout[-3000:]
    kept = executed(project) / "trainings" / "quick-a" / "history.csv"
    trained, first = kept.stat().st_mtime_ns, stamps(project)

    text = project / "book" / "02-two.md"
    text.write_text(text.read_text() + "\nMore prose.\n")
    assert workflow(project).returncode == 0 and kept.stat().st_mtime_ns == trained
    assert stamps(project)["01-one"] == first["01-one"]

    module.write_text(recipes + QUICK.format(body="raise KeyError('no gradient')"))
    done = workflow(project)
    assert done.returncode == 1 and "RED: 3 problem(s)" in done.stdout
    assert "no gradient" in done.stdout and done.stdout.count("not run: the training quick-a failed") == 2


def test_a_module_edited_while_trainings_share_a_job(project, workflow):
    """The second training would run the old code, which is loaded, and count as made from the new."""
    module = project / "nbutils" / "trainings" / "__init__.py"
    edit = f'open({str(module)!r}, "a").write("\\n# edited\\n")'
    recipes = module.read_text() + QUICK.format(body="pass").replace("RECIPES = ", "_FIRST = ")
    second = "\nRECIPES = {**_FIRST, 'quick-b': _quick}\n"
    times = {name: {"seconds": 1.0, "peak_mb": 100.0} for name in ("quick-a", "quick-b")}
    record = project / "tests" / "baselines" / "resources.json"
    record.parent.mkdir(parents=True, exist_ok=True)
    record.write_text(json.dumps({"smoke": {"hardware": ["h"], "jobs": times}}))
    text = chapter("01-one", LOADS.format("one"), imports="from nbutils import trainings")
    (project / "book" / "01-one.md").write_text(text)

    module.write_text(recipes.replace("    pass\n", f"    {edit}\n") + second)
    done = workflow(project)
    assert done.returncode == 1 and "a module of it changed while it ran" in done.stdout, done.stdout[-3000:]
    assert not list(executed(project).glob("trainings/*/history.csv"))

    module.write_text(recipes + second)
    done = workflow(project)
    assert done.returncode == 0, done.stdout[-3000:]
    assert {path.parent.name for path in executed(project).glob("trainings/*/history.csv")} == {"quick-a", "quick-b"}


def test_a_kernel_that_dies(project, workflow):
    (project / "book" / "01-one.md").write_text(chapter("01-one", "import os\nos._exit(3)"))
    done = workflow(project)
    assert done.returncode == 1 and "DeadKernel" in "\n".join(done.stdout.splitlines()[-3:])
    assert set(stamps(project)) == {"02-two"}


def alive(root):
    """Command lines of the processes that work for this copy of the project: jobs there, and kernels elsewhere."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # gone by now, or another user's
            path = process.environ().get("PYTHONPATH", "").split(os.pathsep)
            if process.status() != psutil.STATUS_ZOMBIE and (process.cwd() == str(root) or str(root) in path):
                found.append(" ".join(process.cmdline()))
    return found


def nobody_works(root, patience=10.0):
    """Wait until the jobs notice that their parent is gone; False if one does not."""
    deadline = time.monotonic() + patience
    while (found := alive(root)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return not found


SLOW = 'import time\ntime.sleep({seconds})\nclaims.check("{claim}", "a", 1.0, (0, 2), kind="exact")'


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
    assert nobody_works(project), alive(project)
    reports = executed(project).parent
    if (reports / "metrics.json").exists():  # written once all chapters are done, before the pages
        assert json.loads((reports / "metrics.json").read_text())["run"]["green"]
        assert set(stamps(project)) == {"01-one", "02-two"}
    if (reports / "html" / "index.html").exists():  # the pages come into place in one step
        assert "</html>" in (reports / "html" / "02-two.html").read_text()
    for notebook in executed(project).glob("*.ipynb"):
        json.loads(notebook.read_text())  # whole, or not there
    return True


def kill_and_repair(project, workflow, moments):
    for name, claim in (("01-one", "one"), ("02-two", "two")):
        (project / "book" / f"{name}.md").write_text(chapter(name, SLOW.format(seconds=2, claim=claim)))
    for moment in moments:
        subprocess.run(["rm", "-rf", "_build"], cwd=project)
        while not kill(project, partial(time.sleep, moment)):  # a machine is not equally fast each time
            moment *= 0.8
            subprocess.run(["rm", "-rf", "_build"], cwd=project)
        done = workflow(project, "--html")
        assert done.returncode == 0, f"killed after {moment} s:\n{done.stdout[-3000:]}"
        assert "</html>" in (project / "_build/smoke/html/02-two.html").read_text()
        assert json.loads((project / "_build/smoke/metrics.json").read_text())["run"]["green"]


def test_no_other_program_can_take_the_port_of_a_kernel(project, workflow):
    """Ports that were free a moment ago may be taken when the kernel binds them; a job's own sockets are not."""
    code = "import ipykernel\nprint(ipykernel.get_connection_info())"
    (project / "book" / "01-one.md").write_text(chapter("01-one", f"{code}\n{HOLDS}"))
    assert workflow(project).returncode == 0
    said = (executed(project) / "01-one.ipynb").read_text()
    assert "ipc" in said and "127.0.0.1" not in said


def test_killed_in_the_middle_and_run_again(project, workflow):
    kill_and_repair(project, workflow, [7.0])


def test_killed_over_older_green_results(project, workflow):
    """Nothing of the older run counts as the new text's: no report while it runs, and no notebook of an older text."""
    assert workflow(project, "--html").returncode == 0
    older, notebook = stamps(project), executed(project) / "01-one.ipynb"
    text = project / "book" / "01-one.md"
    text.write_text(chapter("01-one", SLOW.format(seconds=30, claim="one").replace("1.0", "5.0")))

    def running():
        log, deadline = executed(project) / "logs" / "01-one.stderr", time.monotonic() + 60
        log.unlink(missing_ok=True)
        while not log.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert [words for words in alive(project) if "workflow.run_notebook" in words], "alive() sees no job"
        time.sleep(3)

    assert kill(project, running)
    assert not notebook.exists() and stamps(project)["02-two"] == older["02-two"]
    assert not [
        name for name in ("metrics.json", "junit.xml", "summary.md") if (executed(project).parent / name).exists()
    ]

    text.write_text(text.read_text().replace("sleep(30)", "sleep(0)"))
    done = workflow(project, "--html")
    assert done.returncode == 1 and "measured 5, band [0, 2]" in done.stdout.splitlines()[-1], done.stdout[-3000:]


@pytest.mark.slow
def test_killed_at_many_moments(project, workflow):
    """From the first moment to the last: one random moment in each twentieth of a whole run."""
    for name, claim in (("01-one", "one"), ("02-two", "two")):
        (project / "book" / f"{name}.md").write_text(chapter(name, SLOW.format(seconds=2, claim=claim)))
    started = time.monotonic()
    assert workflow(project, "--html").returncode == 0
    whole = time.monotonic() - started
    rng = random.Random(0)
    kill_and_repair(project, workflow, [(i + rng.random()) * whole / 20 for i in range(20)])


def test_a_second_run_gets_one_clear_line(project, workflow):
    (project / "book" / "01-one.md").write_text(
        chapter("01-one", 'import time\ntime.sleep(25)\nclaims.check("one", "a", 1.0, (0, 2), kind="exact")')
    )
    words = [sys.executable, "-m", "workflow", "run", "--profile", "smoke"]
    first = subprocess.Popen(words, cwd=project, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    holder, deadline = project / "_build" / ".holder", time.monotonic() + 60
    while not holder.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    said = f"error: another run is active in this checkout (process {first.pid} on {platform.node()}): wait for it"
    for command in ("run", "alarms"):
        second = workflow(project, command=command)
        assert (second.returncode, second.stdout.strip()) == (2, said)
    assert first.wait(timeout=120) == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--profile", "huge"], "error: unknown profile 'huge': choose one of auto, smoke, book, gpu"),
        (["--device", "tpu"], "error: unknown device 'tpu': choose one of auto, cpu, cuda"),
        (["--seed", "-1"], f"error: seed -1: a seed is a whole number from 0 to {2**31 - 1}"),
        (["03-nothing"], "error: unknown chapter '03-nothing': choose from 01-one, 02-two"),
    ],
)
def test_bad_arguments_say_one_line_and_touch_nothing(project, workflow, arguments, said):
    done = workflow(project, *arguments)
    assert (done.returncode, done.stdout.strip()) == (2, said)
    assert not (project / "_build").exists() and not (project / "book" / "notebooks").exists()


def test_cuda_where_there_is_none(project, workflow):

    if device.cuda_count():
        pytest.skip("this machine has a GPU")
    done = workflow(project, "--device", "cuda")
    assert (
        done.returncode == 2 and "torch finds no CUDA device here" in done.stdout and not (project / "_build").exists()
    )


def test_dependencies_follow_imports():
    walk, t5 = dependencies.of_chapter("01-random-walk"), dependencies.of_chapter("04-t5")
    assert (
        {"nbutils/chapters/walks.py", "nbutils/fits.py"} <= set(walk)
        and "nbutils/chapters/growth.py" not in walk
        and not [f for f in walk if f.endswith(".csv")]
    )
    assert {"nbutils/fits.py", "nbutils/norms/__init__.py", "nbutils/data.py", "book/book.mplstyle"} <= set(t5)
    tables = {f for f in t5 if f.endswith(".csv")}
    assert tables == {f"book/data/{name}.csv" for name in ("t5_norm", "t5_cos_similarity", "t5_norm_by_layer")}


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import nbutils\nnbutils.profile.choose", {"profile"}),
        ("import nbutils as nb\nnb.fits.fit", {"fits"}),
        ("import nbutils.norms", {"norms"}),
        ("from nbutils import norms as n, heads", {"norms", "heads"}),
        ("from nbutils.fits import fit", {"fits"}),
        ("def f():\n    from nbutils import device", {"device"}),
        ("from nbutils.chapters import walks", {"chapters", "chapters.walks"}),
        ("from nbutils.chapters.limits import STEP", {"chapters", "chapters.limits"}),
        ("import nbutils\nnbutils.norms.pieces.Pieces", {"norms", "norms.pieces"}),
        ("from nbutils import homogeneity as h\nh.algebra.shown", {"homogeneity", "homogeneity.algebra"}),
        ("import numpy\nnumpy.norms", set()),
    ],
)
def test_modules_of_code(code, found):
    import ast

    assert dependencies._uses(ast.parse(code)).modules == {f"nbutils.{name}" for name in found}


@pytest.mark.parametrize("chapter", chapters())
def test_what_python_loads_is_among_the_dependencies(chapter):
    """The imports of a chapter in a process of its own, against what is read from its text."""
    code = """
import ast, json, sys
cells = json.load(open(sys.argv[1]))["cells"]
text = "\\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
nodes = [n for n in ast.parse(text).body if isinstance(n, (ast.Import, ast.ImportFrom))]
exec(compile(ast.Module([n for n in nodes if "nbutils" in ast.unparse(n)], []), "imports", "exec"))
print(json.dumps([m.__file__ for n, m in sys.modules.items() if n.split(".")[0] == "nbutils"]))
"""
    notebook = ROOT / "book" / "notebooks" / f"{chapter}.ipynb"
    done = subprocess.run([sys.executable, "-c", code, notebook], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = {str(Path(file).relative_to(ROOT)) for file in json.loads(done.stdout)}
    assert len(loaded) > 5 and loaded - {"nbutils/__init__.py"} <= set(dependencies.of_chapter(chapter))


def test_an_edit_in_each_folder_voids_exactly_the_chapters_that_import_it(project):
    folders = {path.parent for path in (project / "nbutils").rglob("*.py")} - {project / "nbutils"}
    one = "from nbutils.chapters import walks\nfrom nbutils import norms, saturation, trainings"
    two = "from nbutils import checkpoints, homogeneity, text\nfrom nbutils.claims import Ledger"
    for name, imports in (("01-one", one), ("02-two", two)):
        (project / "book" / f"{name}.md").write_text(chapter(name, "claims = None", imports))
    code = (
        "import json; from workflow import notebooks, stale; list(notebooks.sync());"
        "print(json.dumps([stale.sources_of_chapter(name) for name in ('01-one', '02-two')]))"
    )

    def digests():
        done = subprocess.run([sys.executable, "-c", code], cwd=project, capture_output=True, text=True, check=True)
        return json.loads(done.stdout)

    voids = {"chapters/walks": (True, False), "norms/loops": (True, False), "saturation/scaling": (True, False),
             "trainings/recipes_t5": (True, False), "checkpoints/sources": (False, True),
             "homogeneity/rules": (False, True), "text/corpora": (True, True), "claims/records": (True, True),
             "chapters/limits": (False, False)}  # fmt: skip
    assert {project / "nbutils" / name.split("/")[0] for name in voids} == folders, "a folder without a module here"
    before = digests()
    for module, voided in voids.items():
        with open(project / "nbutils" / f"{module}.py", "a") as file:
            file.write("\n# edited\n")
        after = digests()
        assert tuple(x != y for x, y in zip(before, after, strict=True)) == voided, module
        before = after


def test_what_was_measured_over_seeds_outlives_prose_and_docstrings_and_no_edit_of_code(project):
    source, module = project / "book" / "01-one.md", project / "nbutils" / "chapters" / "walks.py"
    source.write_text(chapter("01-one", "claims = None", "from nbutils.chapters import walks"))

    def digests():
        code = (
            "from workflow import notebooks, stale; list(notebooks.sync());"
            "print(stale.sources_of_chapter('01-one'), stale.code_of_chapter('01-one'))"
        )
        done = subprocess.run([sys.executable, "-c", code], cwd=project, capture_output=True, text=True, check=True)
        return done.stdout.split()

    found = [digests()]
    for file, old, new in (
        (source, "\n# ", "\nAnother sentence.\n\n# "),
        (module, '"""', '"""Another word: '),
        (source, "claims = None", "claims = 0"),
        (module, "import numpy as np", "import numpy as np\n\nextra = 1"),
    ):
        text = file.read_text()
        assert old in text
        file.write_text(text.replace(old, new, 1))
        found.append(digests())
    changed = [tuple(x != y for x, y in zip(*pair, strict=True)) for pair in itertools.pairwise(found)]
    assert changed == [(True, False), (True, False), (True, True), (True, True)]


def test_no_chapter_depends_on_the_ledger_of_claims():
    assert "book/claims.yml" not in dependencies.of_chapter("04-t5") and "book/claims.yml" in dependencies.of_pages()


@pytest.mark.parametrize(
    ("remote", "web"),
    [
        ("https://github.com/someone/book.git", "https://github.com/someone/book"),
        ("https://token@github.com/someone/book", "https://github.com/someone/book"),
        ("git@github.com:someone/book.git", "https://github.com/someone/book"),
        ("ssh://git@gitlab.com/someone/book", "https://gitlab.com/someone/book"),
        ("/srv/git/book.git", None),
        ("file:///srv/git/book", None),
        ("../book", None),
        ("", None),
    ],
)
def test_hosted_remotes(remote, web):
    assert hosted(remote) == web


def test_pages_point_to_the_fork(monkeypatch):
    monkeypatch.setattr("workflow.stage.remote_url", lambda: "https://github.com/someone/fork")
    assert configuration()["repository"]["url"] == "https://github.com/someone/fork"
    monkeypatch.setattr("workflow.stage.remote_url", lambda: "https://gitlab.com/someone/fork")
    assert "colab_url" not in configuration()["launch_buttons"], "Colab opens notebooks from GitHub only"
    monkeypatch.setattr("workflow.stage.remote_url", lambda: None)
    assert configuration()["repository"]["url"].startswith("https://github.com/")
    assert remote_url() is None or remote_url().startswith("https://")


def test_nothing_to_do_costs_little(smoke, workflow):
    """Under 2 % of the jobs' own time. CPU time, which a busy machine changes on both sides."""

    def spent() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    assert workflow(ROOT, "--html").returncode == 0
    begun = spent()
    assert workflow(ROOT, "--html").returncode == 0
    stats = [*smoke.glob("seed-0/*.json"), *smoke.glob("seed-0/trainings/*/stats.json")]
    whole = sum(json.loads(file.read_text())["cpu_seconds"] for file in stats)
    assert spent() - begun < 0.02 * whole, (spent() - begun, whole)


def test_one_job_per_gpu(tmp_path, monkeypatch):
    """Three jobs for two GPUs: the first two get one each, the third waits until one is free."""
    import threading

    from workflow import jobs

    monkeypatch.setattr(jobs, "BUILD", tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    got = []

    def third():
        with jobs.gpu_slot(["2", "GPU-b"]) as index:
            got.append(index)

    with jobs.gpu_slot(["2", "GPU-b"]) as first:
        with jobs.gpu_slot(["2", "GPU-b"]) as second:
            assert (first, second) == ("2", "GPU-b") and os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-b"
            waiting = threading.Thread(target=third)
            waiting.start()
            time.sleep(1.5)
            assert got == []
        waiting.join(timeout=10)
        assert got == [second]


def derived(value, kind="derived"):
    """A chapter with one check, of ``value`` (an expression of ``seed``), that holds from 0 to 2."""
    return chapter("01-one", f'claims.check("one", "a number", {value}, (0, 2), kind="{kind}")')


def metrics(project):
    return json.loads((project / "_build" / "smoke" / "metrics.json").read_text())


def test_what_fails_by_chance_is_looked_at_again_and_noted(project, workflow):
    """One of three seeds: green, and told on the page, in metrics.json, in JUnit and in the last line."""
    (project / "book" / "01-one.md").write_text(derived("5.0 if seed == 0 else 1.25"))
    done = workflow(project, "--html")
    last = done.stdout.strip().splitlines()[-2]
    assert done.returncode == 0 and "1 checks hold, 1 noted" in last and "2 confirmed" in last, done.stdout[-3000:]
    (record,) = [each for each in metrics(project)["records"] if each["claim"] == "one"]
    assert record["noted"] and [each["measured"] for each in record["further"]] == [1.25, 1.25]
    page = (project / "_build/smoke/html/01-one.html").read_text()
    assert "held at two others: 1.25 at seed 1000003 and 1.25 at seed 2000006" in page and "◐" in page
    assert "✗" not in page and "This run is red" not in page
    junit = (project / "_build/smoke/junit.xml").read_text()
    assert 'name="noted" value="1.25 at seed 1000003, 1.25 at seed 2000006"' in junit and "<failure" not in junit


@pytest.mark.parametrize(
    "value", ["5.0", "5.0 if seed in (0, 1000003) else 1.0"], ids=["three of three", "two of three"]
)
def test_what_fails_again_is_red_and_its_sentences_are_left_out(project, workflow, value):
    source = project / "book" / "01-one.md"
    said = "\n:::{finding} one\nWe find that all is well.\n:::\n\n:::{finding} two\nThe second stands.\n:::\n"
    source.write_text(derived(value) + said)
    done = workflow(project, "--html")
    assert done.returncode == 1 and "looked at again: 5 at seed 1000003" in done.stdout, done.stdout[-3000:]
    assert metrics(project)["verdicts"] == {"one": "failed", "two": "confirmed"}
    page = (project / "_build/smoke/html/01-one.html").read_text()
    assert "all is well" not in page and "The second stands" in page
    assert "the verdict on <code" in page.replace("\n", " ") and "is <em>failed</em>" in page
    for name in ("index", "01-one", "02-two", "scorecard"):
        text = (project / f"_build/smoke/html/{name}.html").read_text()
        assert "This run is red" in text and 'href="01-one.html#claim-one"' in text, name
        assert "is no verdict on the paper" in text


def test_an_exact_check_is_never_looked_at_again(project, workflow):
    (project / "book" / "01-one.md").write_text(derived("5.0 if seed == 0 else 1.0", kind="exact"))
    done = workflow(project)
    assert done.returncode == 1 and "looked at again" not in done.stdout
    assert not (project / "_build/smoke/seed-1000003").exists()


def test_an_exact_check_that_fails_at_a_further_seed_is_red(project, workflow):
    code = 'claims.check("one", "exact", 1.0 + 4 * (seed == 2000006), (0, 2), kind="exact")'
    (project / "book" / "01-one.md").write_text(
        derived("5.0 if seed == 0 else 1.0") + f"\n```{{code-cell}}\n{code}\n```\n"
    )
    done = workflow(project)
    assert done.returncode == 1 and "exact (at seed 2000006)" in done.stdout, done.stdout[-3000:]


def test_pages_last_line_and_status_read_one_file(project, workflow):
    """What changes after verdicts were collected changes none of them."""
    done = workflow(project, "--html")
    assert done.returncode == 0
    file = project / "_build/smoke/metrics.json"
    kept = json.loads(file.read_text())
    kept["verdicts"]["one"] = "refuted"
    file.write_text(json.dumps(kept))
    subprocess.run(
        [sys.executable, "-m", "workflow.stage", "--profile", "smoke", "--seed", "0"], cwd=project, check=True
    )
    assert "verdict-refuted" in (project / "_build/smoke/source/scorecard.md").read_text()


def test_alarms_count_runs_go_on_and_outlive_an_edit_of_the_workflow(project, workflow):
    (project / "book" / "01-one.md").write_text(derived("5.0 if seed == 6 else 1.0"))
    code = 'claims.check("two", "a number", 5.0 if seed % 10 == 3 and seed < 1000 else 1.0, (0, 2), kind="exact")'
    (project / "book" / "02-two.md").write_text(chapter("02-two", code))
    words = {"command": "alarms"}
    done = workflow(project, "--first", "5", "--seeds", "2", **words)
    assert done.returncode == 0, done.stdout[-3000:]
    last = done.stdout.strip().splitlines()[-1]
    assert last.startswith("SO FAR GREEN: 0.0 % of smoke runs red") and "2 of 100 runs, 1 noted" in last
    (project / "workflow" / "jobs.py").write_text((project / "workflow" / "jobs.py").read_text() + "\n# a remark\n")
    shutil.rmtree(project / "_build")  # a new session: the file is what is left
    done = workflow(project, "--first", "5", "--seeds", "9", **words)
    last = done.stdout.strip().splitlines()[-1]
    assert done.returncode == 1 and last.startswith("RED: 11.1 % of smoke runs red"), done.stdout[-3000:]
    assert not (project / "_build/smoke/seed-5").exists(), "what was measured is not run again"
    kept = json.loads((project / "tests/baselines/alarms-smoke.json").read_text())["chapters"]
    assert list(kept["01-one"]["runs"]) == [str(seed) for seed in range(5, 14)]
    assert [seed for seed, failed in kept["02-two"]["runs"].items() if failed] == ["13"]
    assert kept["01-one"]["measured"]["one/a number"]["n"] == 9
    source = project / "book" / "02-two.md"
    source.write_text(source.read_text().replace("5.0 if", "0.5 if"))
    done = workflow(project, "--first", "5", "--seeds", "2", "01-one", **words)
    last = done.stdout.strip().splitlines()[-1]
    assert done.returncode == 0 and last.startswith("SO FAR GREEN"), "its red run is of another text"
    assert "not measured since they changed: 02-two" in last


def test_no_circle_of_imports_and_no_arrow_from_what_is_shared_to_a_chapter():
    """Imports inside functions and for types alone count too; a package runs before its parts, which is no circle."""
    graph = {
        name: {used for used in dependencies._of_module(name).modules if not name.startswith(f"{used}.")} - {name}
        for name in dependencies.known_modules()
    }
    shared = {name: used for name, used in graph.items() if not name.startswith("nbutils.chapters")}
    assert {name: up for name, used in shared.items() if (up := {u for u in used if "chapters" in u})} == {}
    order = list(TopologicalSorter(graph).static_order())  # raises CycleError, which names the circle
    assert order.index("nbutils.names") < order.index("nbutils.norms") < order.index("nbutils.training")
