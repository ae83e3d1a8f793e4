"""The template of a chapter: what `python -m workflow new-chapter` writes keeps all rules, and runs green."""

import subprocess
import sys

import test_notebooks as rules

SHAPE = (
    rules.test_lines_of_code_fit_the_page,
    rules.test_chapter_has_the_shape_of_the_book,
    rules.test_each_exercise_has_a_folded_solution_and_solutions_run,
    rules.test_each_chapter_has_exercises_of_four_kinds,
    rules.test_prose_is_plain_markdown,
    rules.test_committed_notebook_is_in_step_with_its_source,
    rules.test_first_cell_installs_from_the_configured_repository,
)


UNFILLED = (
    "§N",
    "two sentences of your own",
    "In your own words.",
    "Say why.",
    "Say where, and show it.",
    "in one sent",
)


def unfilled(root):
    """Words of the template that still stand in a chapter or a claim."""
    files = [root / "book" / "claims.yml", *(root / "book").glob("[!_]*.md")]
    return {(file.name, words) for file in files for words in UNFILLED if words in file.read_text(encoding="utf-8")}


def call(project, *words):
    command = [sys.executable, "-m", "workflow", *words]
    return subprocess.run(command, cwd=project, capture_output=True, text=True, env={"PATH": "", "PYTHONPATH": ""})


def test_a_new_chapter_keeps_all_rules_and_runs(project, workflow, monkeypatch):
    (project / "book" / "random-walk.md").write_text((project / "book" / "01-one.md").read_text())
    contents = project / "_toc.yml"  # the template links to the walk
    contents.write_text(contents.read_text().replace("  - file: 01-one\n", "  - file: random-walk\n  - file: 01-one\n"))
    done = call(project, "new-chapter", "my-question", "A question of mine")
    assert done.returncode == 0, done.stderr
    assert {words for _, words in unfilled(project)} == set(UNFILLED)
    run = workflow(project, "my-question")
    assert run.returncode == 0 and "1 confirmed" in run.stdout, run.stdout[-3000:]
    assert call(project, "notebooks").returncode == 0
    for module in (rules, rules.book):
        monkeypatch.setattr(module, "ROOT", project)
    for rule in SHAPE:
        rule("my-question")
    assert "file: 02-two\n  - file: my-question\n" in (project / "_toc.yml").read_text()
    assert "TITLE" not in (text := (project / "book" / "my-question.md").read_text()) and "CLAIM" not in text


def test_names_that_are_taken_or_wrong_are_refused(project):
    refused = {"My question": "small letters, digits and hyphens", "two": "there is a claim 'two'"}
    refused |= {"errata": "there is a page of this name"}
    for name, reason in refused.items():
        assert reason in call(project, "new-chapter", name, "x").stderr
    assert not (project / "book" / "two.md").exists()


def test_nothing_of_the_template_is_left_to_fill_in():
    left = [f"{file} still has {words!r} of the template" for file, words in sorted(unfilled(rules.ROOT))]
    assert not left, "; ".join(["fill in, or take out", *left])
