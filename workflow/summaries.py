"""What a run leaves for machines and people: ``metrics.json``, JUnit and a Markdown summary.

Each names chapter, claim, source in the paper, measured value, band, baseline, seed and the command that runs it again.
"""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from nbutils.claims.records import Record, format_band, format_number
from workflow import jobs
from workflow.report import Problem, Report, again, format_baseline, load_claims, shown_by


def write(report: Report, folder: Path) -> None:
    """Write ``junit.xml``, ``summary.md`` and ``metrics.json`` of a run."""
    folder.mkdir(parents=True, exist_ok=True)
    jobs.put(folder / "junit.xml", junit(report).decode())
    jobs.put(folder / "summary.md", markdown(report))
    jobs.put(folder / "metrics.json", json.dumps(metrics(report), indent=1, ensure_ascii=False) + "\n")


def withdraw(folder: Path) -> None:
    """Remove the reports of an earlier run, so that one which does not get to its end leaves none."""
    for name in ("metrics.json", "junit.xml", "summary.md"):
        (folder / name).unlink(missing_ok=True)


def say_red(folder: Path) -> bool:
    """Whether the ``metrics.json`` of a folder says that its run was red; one that cannot be read does not."""
    try:
        return json.loads((folder / "metrics.json").read_text(encoding="utf-8"))["run"]["green"] is False
    except (OSError, ValueError, KeyError, TypeError):
        return False


def metrics(report: Report) -> dict[str, Any]:
    """All that a run says, as JSON. A record has its source, baseline and command beside what the chapter wrote."""
    sources = _sources()
    return {
        "run": report.run,
        "records": [
            {
                **record.as_dict(),
                "source": sources.get(record.claim),
                "again": _again(report, [record.chapter]),
            }
            for record in report.records
        ],
        "verdicts": report.verdicts,
        "problems": [
            {
                **problem._asdict(),
                "source": sources.get(problem.claim),
                "seed": report.run["seed"],
                "again": _again(report, shown_by(problem)),
            }
            for problem in report.problems
        ],
    }


def junit(report: Report) -> bytes:
    """JUnit XML: a suite a chapter, a case a check; other problems are cases of their own."""
    root = ET.Element("testsuites", name="claims")
    suites: dict[str, ET.Element] = {}
    sources = _sources()

    def case(chapter: str, name: str, shown: Sequence[str], **properties: Any) -> ET.Element:
        if chapter not in suites:
            suites[chapter] = ET.SubElement(root, "testsuite", name=chapter)
        element = ET.SubElement(suites[chapter], "testcase", classname=chapter, name=name)
        known = {**properties, "seed": report.run["seed"], "again": _again(report, shown)}
        listed = ET.SubElement(element, "properties")
        for key, value in known.items():
            ET.SubElement(listed, "property", name=key, value=str(value or "") if value != 0 else "0")
        return element

    for record in report.records:
        said = _facts(record, sources)
        name, shown = f"{record.claim}: {record.check}", [record.chapter]
        element = case(record.chapter, name, shown, claim=record.claim, **said)
        if record.role == "open":
            ET.SubElement(element, "skipped", message=record.reason)
        elif record.fails:
            message = f"measured {said['measured']}, band {said['band']}"
            failure = ET.SubElement(element, "failure", message=message)
            failure.text = "\n".join(f"{key}: {value}" for key, value in said.items() if value)
            failure.text += f"\nseed: {report.run['seed']}\nrun again: {_again(report, shown)}"
    for problem in report.problems:
        if not problem.measured:
            source = sources.get(problem.claim, "")
            name, shown = problem.claim or "notebook", shown_by(problem)
            element = case(problem.chapter, name, shown, claim=problem.claim, source=source)
            ET.SubElement(element, "error", message=problem.what)
    for suite in suites.values():
        for count, tag in (
            ("tests", "testcase"),
            ("failures", ".//failure"),
            ("errors", ".//error"),
            ("skipped", ".//skipped"),
        ):
            suite.set(count, str(len(suite.findall(tag))))
    return ET.tostring(root, encoding="utf-8", xml_declaration=True)


def markdown(report: Report) -> str:
    """A summary for a CI page: the problems first, then the verdicts, then every check, folded up by chapter."""
    run, sources = report.run, _sources()
    lines = [f"## Claims, profile {run['profile']}, seed {run['seed']}: {'green' if run['green'] else 'red'}", ""]
    if report.problems:
        heads = ["chapter", "claim", "source", "problem", "measured", "band", "baseline", "seed", "run again"]
        lines += rows(heads, (_problem_row(report, problem, sources) for problem in report.problems))
        lines.append("")
    checks = {claim: [record for record in report.records if record.claim == claim] for claim in report.verdicts}
    lines += rows(
        ["claim", "source", "verdict", "checks"],
        (
            (
                name,
                sources.get(name, ""),
                found,
                f"{sum(r.holds is True for r in checks[name])} of {len(checks[name])} hold",
            )
            for name, found in report.verdicts.items()
        ),
    )
    for chapter in dict.fromkeys(record.chapter for record in report.records):
        mine = [record for record in report.records if record.chapter == chapter]
        lines += ["", "<details>", f"<summary>{chapter}: {len(mine)} checks, seed {run['seed']}</summary>", ""]
        lines += [f"Run again: `{_again(report, [chapter])}`", ""]
        marks = {True: "yes", "noted": "noted", False: "**no**", None: "open"}
        lines += rows(
            ["claim", "source", "check", "kind", "role", "measured", "band", "baseline", "looked at again", "holds"],
            (
                (
                    record.claim,
                    *_facts(record, sources).values(),
                    marks["noted" if record.noted else record.holds],
                )
                for record in mine
            ),
        )
        lines += ["", "</details>"]
    return "\n".join(lines) + "\n"


def rows(heads: Iterable[str], cells: Iterable[Iterable[Any]]) -> list[str]:
    """Lines of a Markdown table."""
    heads = list(heads)
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return lines + ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in cells]


def _problem_row(report: Report, problem: Problem, sources: dict[str, str]) -> tuple[Any, ...]:
    chapter, claim, what, measured, band, baseline = problem
    command = f"`{_again(report, shown_by(problem))}`"
    return chapter, claim, sources.get(claim, ""), what, measured, band, baseline, report.run["seed"], command


def _facts(record: Record, sources: dict[str, str]) -> dict[str, str]:
    return {
        "source": sources.get(record.claim, ""),
        "check": record.check,
        "kind": record.kind or "",
        "role": record.role,
        "measured": "" if record.role == "open" else format_number(record.measured),
        "band": "" if record.role == "open" else format_band(record),
        "baseline": format_baseline(record),
        "noted": ", ".join(f"{format_number(r['measured'])} at seed {r['seed']}" for r in record.further),
    }


def _sources() -> dict[str, str]:
    return {name: "our question" if claim.get("ours") else claim["source"] for name, claim in load_claims().items()}


def _again(report: Report, chapters: Sequence[str]) -> str:
    return again(report.run["profile"], report.run["seed"], report.run.get("device"), chapters)
