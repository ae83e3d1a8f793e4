"""From the records of chapters to verdicts and problems: what a run says, and what makes it red."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from nbutils.claims import OF_CHANCE, verdict
from nbutils.claims.records import Record, format_band, format_number
from workflow import book, commit
from workflow.collect import Collected


class Problem(NamedTuple):
    """One reason why a run is red."""

    chapter: str
    claim: str
    what: str
    measured: str = ""
    band: str = ""


class Judgement(NamedTuple):
    """All that a run says."""

    run: dict[str, Any]
    records: list[Record]
    verdicts: dict[str, str]
    problems: list[Problem]


def judge(collected: Collected, reruns: Sequence[Collected] = ()) -> Judgement:
    """Verdicts and problems of a run. ``reruns`` are those of chapters that chance may have failed, at two other seeds.

    A chapter without a result is a problem that names its cell.
    """
    records: list[Record] = []
    for chapter in collected.records:
        records += after_reruns(chapter, collected, reruns)
    ran = list(collected.records)
    verdicts, problems = audit(book.claims(), records, ran, book.chapters())
    missing = [Problem(chapter, "", reason) for chapter, reason in collected.missing.items()]
    stats = list(collected.stats.values())
    facts = {
        "profile": collected.run.profile,
        "seed": collected.run.seed,
        "commit": commit(),
        "device": collected.run.device,
        "hardware": stats[0]["hardware"] if stats else None,
        "versions": stats[0]["versions"] if stats else {},
        "chapters": ran,
        "notebooks": [{"chapter": chapter, **facts} for chapter, facts in collected.stats.items()],
        "verdict_counts": dict(Counter(verdicts.values())),
        "kinds": dict(Counter(record.kind for record in records if record.kind)),
        "noted": sum(record.noted for record in records),
        "green": not (missing or problems),
    }
    return Judgement(facts, records, verdicts, missing + problems)


def stopped(judgement: Judgement, reason: str) -> Judgement:
    """The judgement on a run whose workflow did not reach its end: red, whatever the notebooks say.

    The reason comes first.
    """
    problems = [Problem("workflow", "", reason), *judgement.problems]
    return judgement._replace(problems=problems, run={**judgement.run, "green": False})


# ---- verdicts ----


def audit(
    claims: Mapping[str, Mapping[str, Any]],
    records: Sequence[Record],
    chapters: Iterable[str],
    existing: Iterable[str] = (),
) -> tuple[dict[str, str], list[Problem]]:
    """Verdicts on the claims of ``chapters`` (those that ran to their end), and everything that makes the run red.

    A claim that another of the ``existing`` chapters decides too has no verdict until that one has run as well.
    """
    ran = set(chapters)
    problems = [_failed(record) for record in records if record.fails]
    by_claim: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        by_claim[record.claim].append(record)
    for name, checks in by_claim.items():
        if name not in claims:
            problems.append(Problem(checks[0].chapter, name, "checked, but not listed in claims.yml"))
            continue
        for chapter in {record.chapter for record in checks} - set(claims[name]["chapters"]):
            problems.append(Problem(chapter, name, "checked in a chapter that claims.yml does not name for it"))
    verdicts = {}
    for name, claim in claims.items():
        checks = by_claim.get(name, [])
        listed = set(claim["chapters"])
        here = ran & listed
        if not listed or listed - set(existing):
            problems.append(Problem("claims.yml", name, "names no chapter, or one that is not there"))
        for chapter in sorted(here - {record.chapter for record in checks}):
            problems.append(Problem(chapter, name, "listed in claims.yml, but the chapter does not check it"))
        waits = bool(listed & set(existing) - ran) and not any(record.fails for record in checks)
        if not here or waits:
            continue
        verdicts[name] = verdict(checks)
        if verdicts[name] not in claim["expected"].split(" or "):
            reason = f"verdict {verdicts[name]}, but claims.yml expects {claim['expected']}"
            problems.append(Problem(sorted(here)[0], name, reason))
    return verdicts, problems


def _failed(record: Record) -> Problem:
    reason = f"{record.role} check does not hold: {record.check}"
    if record.further:
        values = [f"{format_number(rerun['measured'])} at seed {rerun['seed']}" for rerun in record.further]
        reason += f" (rerun: {', '.join(values)})"
    return Problem(record.chapter, record.claim, reason, format_number(record.measured), format_band(record))


# ---- two of three seeds ----


def chance_may_have_failed(records: Iterable[Record]) -> bool:
    """Whether a chapter is to be rerun at two other seeds: it has failed checks, and chance may have failed each."""
    failed = [record for record in records if record.holds is False]
    return bool(failed) and all(record.kind in OF_CHANCE for record in failed)


def to_rerun(collected: Collected) -> tuple[str, ...]:
    """The chapters of a run that chance may have failed."""
    return tuple(name for name, records in collected.records.items() if chance_may_have_failed(records))


def after_reruns(chapter: str, collected: Collected, reruns: Sequence[Collected]) -> list[Record]:
    """The records of a chapter; one that chance may have failed with what the reruns measured, if all of them ended.

    It is ``noted``, and counts as held, if it holds in both reruns: of three seeds one failed. A check that held here
    and fails in both reruns, or has no chance in it and fails in one, is added: it is as red as any.
    """
    records = collected.records[chapter]
    if not reruns or any(chapter not in rerun.records for rerun in reruns):
        return records
    others = [{record.key: record for record in rerun.records[chapter]} for rerun in reruns]
    judged = [_with_reruns(record, others) if record.holds is False else record for record in records]
    failed_here = {record.key for record in records if record.holds is False}
    for key in others[0]:
        if key in failed_here or not all(key in other for other in others):
            continue
        failed = [other[key] for other in others if other[key].holds is False]
        if len(failed) == len(others) or (failed and failed[0].kind not in OF_CHANCE):
            seeds = ", ".join(str(record.seed) for record in failed)
            judged.append(replace(failed[0], check=f"{failed[0].check} (at seed {seeds})", anchor=None))
    return judged


def _with_reruns(record: Record, others: Sequence[Mapping[tuple[str, str], Record]]) -> Record:
    """A check that fails, with what the reruns measured: noted if it holds in all of them."""
    measured = [other[record.key] for other in others if record.key in other]
    further = tuple({"seed": rerun.seed, "measured": rerun.measured, "holds": rerun.holds} for rerun in measured)
    noted = sum(rerun.holds is True for rerun in measured) == len(others)
    return replace(record, further=further, noted=noted)
