"""Judgements as JUnit XML, which GitHub, GitLab and Jenkins read: a suite for a notebook, a case for a check."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from xml.etree.ElementTree import Element, ElementTree, SubElement, indent

from nbutils.claims.check import Judgement
from nbutils.claims.records import Record, format_band, format_measured, mark_and_text

NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # XML 1.0, production 2


def write(file: Path, judgements: Iterable[Judgement], *, strict: bool = False) -> None:
    """Write what ``nbutils check`` found; with ``strict``, a check that is left open is a failure and not skipped."""
    root = Element("testsuites", name="nbutils check")
    root.extend(_suite(judgement, strict) for judgement in judgements)
    _count(root, "failures", "errors")
    root.set("time", f"{sum(float(suite.get('time', 0)) for suite in root):.3f}")
    indent(root)
    ElementTree(root).write(file, encoding="utf-8", xml_declaration=True)


def _suite(judgement: Judgement, strict: bool) -> Element:
    suite = Element("testsuite", name=_text(str(judgement.notebook)), time=f"{judgement.duration:.3f}")
    if judgement.started:
        suite.set("timestamp", judgement.started[:19])  # to the second
    chapter = judgement.records[0].chapter if judgement.records else judgement.notebook.stem
    for record, seconds in zip(judgement.records, judgement.seconds, strict=True):
        check = f"{record.check}, seed {record.seed}" if record.seed else record.check  # GitLab drops a name's second
        name = {"classname": _text(f"{chapter}.{record.claim}"), "name": _text(check)}
        _outcome(SubElement(suite, "testcase", name, time=f"{seconds:.3f}"), record, strict)
    for fault in judgement.faults:
        case = SubElement(suite, "testcase", classname=_text(chapter), name="the notebook", time="0.000")
        SubElement(case, "error", type="notebook", message=_text(fault))
    _count(suite, "failures", "errors", "skipped")
    return suite


def _outcome(case: Element, record: Record, strict: bool) -> None:
    """Nothing for a check that holds."""
    if record.role == "open":
        SubElement(case, "failure" if strict else "skipped", type="open", message=_text(record.reason or ""))
    elif record.fails:
        message = f"measured {format_measured(record)}; band {format_band(record)}"
        failure = SubElement(case, "failure", type=str(record.kind), message=_text(message))
        run = f"profile {record.profile}, seed {record.seed}, on {record.device}"
        failure.text = _text(f"{record.claim} {mark_and_text(record)[1]}\n{run}")


def _count(element: Element, *outcomes: str) -> None:
    element.set("tests", str(len(list(element.iter("testcase")))))
    for outcome in outcomes:
        element.set(outcome, str(len(list(element.iter(outcome.removesuffix("s"))))))


def _text(text: str) -> str:
    """Text without characters that XML cannot hold."""
    return NOT_XML.sub("\ufffd", text)
