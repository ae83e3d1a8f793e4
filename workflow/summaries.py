"""What a run leaves for machines and people: ``metrics.json``, JUnit and a Markdown summary.

Each names chapter, claim, source in the paper, measured value, band, seed and the command that runs it again.
"""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nbutils.claims.records import Record, format_band, format_number
from workflow import BUILD, Run, book, write_atomically
from workflow.report import VERSION, Report, rerun_command, shown_by


def write(report: Report, run: Run) -> None:
    """Write ``junit.xml``, ``summary.md`` and ``metrics.json`` of a run; that of the book in ``_build`` as well."""
    run.reports.mkdir(parents=True, exist_ok=True)
    found = json.dumps(metrics(report), indent=1, ensure_ascii=False) + "\n"
    texts = {"junit.xml": junit(report), "summary.md": markdown(report), "metrics.json": found}
    try:
        for file in _files(run):
            write_atomically(file, texts[file.name])
    except OSError:
        withdraw(run)  # those that were written may say green
        raise


def withdraw(run: Run) -> None:
    """Remove the reports of an earlier run, so that one which does not get to its end leaves none."""
    for file in _files(run):
        file.unlink(missing_ok=True)


def _files(run: Run) -> list[Path]:
    found = [run.reports / name for name in ("junit.xml", "summary.md", "metrics.json")]
    return [*found, BUILD / "metrics.json"] if run.profile == "book" else found


def metrics(report: Report) -> dict[str, Any]:
    """All that a run says, as ``book/_static/metrics.schema.json`` describes it.

    A record has its source and command beside what the chapter wrote.
    """
    return {
        "version": VERSION,
        "run": report.run,
        "records": [
            {**each.as_dict(), "source": _source(each.claim), "again": rerun_command(report.run, [each.chapter])}
            for each in report.records
        ],
        "verdicts": report.verdicts,
        "problems": [
            {
                **each._asdict(),
                "source": _source(each.claim),
                "seed": report.run["seed"],
                "again": rerun_command(report.run, shown_by(each)),
            }
            for each in report.problems
        ],
    }


def junit(report: Report) -> str:
    """JUnit XML: a suite a chapter, a case a check; other problems are cases of their own."""
    root = ET.Element("testsuites", name="claims")
    suites: dict[str, ET.Element] = {}

    def case(chapter: str, name: str, shown: Sequence[str], **properties: Any) -> ET.Element:
        if chapter not in suites:
            suites[chapter] = ET.SubElement(root, "testsuite", name=chapter)
        element = ET.SubElement(suites[chapter], "testcase", classname=chapter, name=name)
        known = {**properties, "seed": report.run["seed"], "again": rerun_command(report.run, shown)}
        listed = ET.SubElement(element, "properties")
        for key, value in known.items():
            ET.SubElement(listed, "property", name=key, value=str(value))
        return element

    for record in report.records:
        facts = _facts(record)
        element = case(record.chapter, f"{record.claim}: {record.check}", [record.chapter], claim=record.claim, **facts)
        if record.role == "open":
            ET.SubElement(element, "skipped", message=record.reason or "")
        elif record.fails:
            message = f"measured {facts['measured']}, band {facts['band']}"
            failure = ET.SubElement(element, "failure", message=message)
            lines = [f"{each.get('name')}: {each.get('value')}" for each in element.iter("property")]
            failure.text = "\n".join(line for line in lines if not line.endswith(": "))
    for problem in report.problems:
        if not problem.measured:
            name, shown = problem.claim or "notebook", shown_by(problem)
            element = case(problem.chapter, name, shown, claim=problem.claim, source=_source(problem.claim))
            ET.SubElement(element, "error", message=problem.what)
    for suite in suites.values():
        tags = {"tests": "testcase", "failures": ".//failure", "errors": ".//error", "skipped": ".//skipped"}
        for count, tag in tags.items():
            suite.set(count, str(len(suite.findall(tag))))
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def markdown(report: Report) -> str:
    """A summary for a CI page: the problems first, then the verdicts, then every check, folded up by chapter."""
    from jinja2 import Environment, FileSystemLoader

    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), trim_blocks=True, lstrip_blocks=True)
    environment.filters["cell"] = lambda value: str(value).replace("|", "\\|")
    checks = {
        chapter: [(each, _facts(each)) for each in report.records if each.chapter == chapter]
        for chapter in dict.fromkeys(record.chapter for record in report.records)
    }
    hold = {claim: [each.holds is True for each in report.records if each.claim == claim] for claim in report.verdicts}
    template = environment.get_template("summary.md.j2")
    return template.render(
        report._asdict(), checks=checks, hold=hold, source=_source, again=rerun_command, shown_by=shown_by
    )


def _facts(record: Record) -> dict[str, str]:
    decided = record.role != "open"
    return {
        "source": _source(record.claim),
        "check": record.check,
        "kind": record.kind or "",
        "role": record.role,
        "measured": format_number(record.measured) if decided else "",
        "band": format_band(record) if decided else "",
        "noted": ", ".join(f"{format_number(each['measured'])} at seed {each['seed']}" for each in record.further),
    }


def _source(claim: str) -> str:
    found = book.claims().get(claim)
    return book.origin(found) if found else ""
