"""A tag makes a release only of what it names, and what PyPI gets works in a fresh environment."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib

import pytest
import yaml

from workflow import ROOT

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
TAG = f"v{VERSION}"
PLACES = ("pyproject.toml", "normgrowth/__init__.py", "CITATION.cff", "CHANGELOG.md")
SECTION = "- What is new.\n- And what else."


@pytest.fixture
def released(tmp_path):
    """The places that name the version, as they are on the day of a release, and the script that compares them."""
    for place in (*PLACES, ".ci/release.py"):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / place, tmp_path / place)
    older = "\n\n## 0.0.9, 2020-01-01\n\n- Older.\n"
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n## {VERSION}, 2026-01-31\n\n{SECTION}{older}")
    return tmp_path


def ask(root, tag=TAG):
    words = [sys.executable, ".ci/release.py", tag, "notes.md"]
    return subprocess.run(words, cwd=root, capture_output=True, text=True)


def test_a_release_whose_places_agree_has_the_changelogs_section_as_its_text(released):
    done = ask(released)
    assert done.returncode == 0, done.stderr
    assert (released / "notes.md").read_text() == f"{SECTION}\n"


@pytest.mark.parametrize("place", PLACES)
def test_a_place_with_another_version_is_named(released, place):
    text = (released / place).read_text()
    assert VERSION in text
    (released / place).write_text(text.replace(VERSION, "9.9.9", 1))
    done = ask(released)
    assert done.returncode == 1 and done.stderr == f"the tag is {TAG}, but\n  {place} has 9.9.9\n"
    assert not (released / "notes.md").exists()


@pytest.mark.parametrize("tag", ["v9.9.9", VERSION, f"{TAG}rc1", f"{TAG}.0"])
def test_a_tag_of_another_version_is_refused_with_all_places(released, tag):
    done = ask(released, tag)
    assert done.returncode == 1 and all(f"{place} has {VERSION}" in done.stderr for place in PLACES)


@pytest.mark.parametrize(
    ("changelog", "reason"),
    [
        (
            f"# Changelog\n\n## {VERSION}, not yet released\n\n- New.\n",
            f"'{VERSION}, not yet released', and needs the day",
        ),
        (f"# Changelog\n\n## {VERSION}\n\n- New.\n", "and needs the day"),
        (f"# Changelog\n\n## {VERSION}, 2026-01-31\n\n## 0.0.9, 2020-01-01\n\n- Old.\n", "no text under its first"),
        ("# Changelog\n", "CHANGELOG.md has none"),
    ],
)
def test_a_changelog_that_is_not_ready_is_refused(released, changelog, reason):
    (released / "CHANGELOG.md").write_text(changelog)
    done = ask(released)
    assert done.returncode == 1 and reason in done.stderr


def test_this_checkout_needs_no_more_than_the_day_of_its_release(tmp_path):
    """So the places agree every day, and not only on that one."""
    words = [sys.executable, str(ROOT / ".ci" / "release.py"), TAG, str(tmp_path / "notes.md")]
    done = subprocess.run(words, capture_output=True, text=True)
    others = [line for line in done.stderr.splitlines()[1:] if "needs the day" not in line]
    assert not others


def test_only_green_work_is_published_and_no_secret_is_needed():
    """PyPI knows the workflow, GitHub gets the release last, and each job has the rights that it needs and no more."""
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    workflow = yaml.safe_load(text)
    jobs = workflow["jobs"]
    assert workflow[True] == {"push": {"tags": ["v*"]}}  # YAML takes `on` for true
    assert {name: job.get("needs") for name, job in jobs.items()} == {
        "packages": None, "book": "packages", "pypi": ["packages", "book"], "github": "pypi",
    }  # fmt: skip
    assert workflow["permissions"] == {"contents": "read"} and "secrets." not in text and "password" not in text
    rights = {name: job["permissions"] for name, job in jobs.items() if "permissions" in job}
    assert rights == {"pypi": {"id-token": "write"}, "github": {"contents": "write"}}
    assert jobs["pypi"]["environment"]["name"] == "pypi"


def test_dependabot_watches_the_pins_and_the_actions():
    updates = yaml.safe_load((ROOT / ".github" / "dependabot.yml").read_text())["updates"]
    assert {update["package-ecosystem"]: update["directory"] for update in updates} == {
        "pip": "/",
        "github-actions": "/",
    }


@pytest.mark.slow
def test_what_pypi_gets_works_in_a_fresh_environment(tmp_path):
    """The wheel that the sdist builds, with the packages that are installed here; what the wheel needs, CI installs."""
    environment = {**os.environ, "DIST": str(tmp_path / "dist"), "PYTHON": sys.executable}
    environment["INSTALLED"] = sysconfig.get_path("purelib")
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(["bash", ".ci/wheel"], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    name = f"norm_growth-{VERSION}"
    assert {file.name for file in (tmp_path / "dist").iterdir()} == {f"{name}.tar.gz", f"{name}-py3-none-any.whl"}
