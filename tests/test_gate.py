"""What a later run may not lose, and the page over many runs: the ways in which a regression passed before."""

import json
import re
from xml.etree import ElementTree

import pytest

from workflow import compare, gate, trend
from workflow.__main__ import main

CHAPTERS = [f"{i:02d}-chapter" for i in range(1, 6)]


def record(chapter, i, measured=0.5, band=(0.0, 1.0), **more):
    return {"chapter": chapter, "claim": f"claim-{chapter}", "check": f"check {i}", "role": "stated",
            "form": "population", "kind": "empirical", "measured": measured, "band": list(band),
            "holds": band[0] <= measured <= band[1],
            "n": 9, **more}  # fmt: skip


def run(change=lambda entry: entry, *, seconds=60.0, mb=900.0, keep=CHAPTERS, started="2026-01-01", **settings):
    records = [change(record(chapter, i)) for chapter in keep for i in range(20)]
    notebooks = [{"chapter": c, "cpu_seconds": seconds, "peak_mb": mb, "started": started} for c in CHAPTERS]
    green = all(entry["holds"] for entry in records)
    facts = {"profile": "smoke", "seed": 0, "device": "cpu", "hardware": "h", "versions": {}, "green": green,
             "notebooks": notebooks, "commit": "c0ffee"}  # fmt: skip
    verdicts = {f"claim-{chapter}": "confirmed" for chapter in CHAPTERS}
    return {"run": facts | settings, "records": records, "verdicts": verdicts, "problems": []}


def kinds(b, a=None, **factors):
    found = compare.compare(a or run(), b, **factors)
    assert found.red == any(each.red for each in found.findings())
    return {each.kind for each in found.lost if each.red}


def test_two_equal_runs_lose_nothing():
    assert kinds(run()) == set() and compare.compare(run(), run()).lost == []


def test_a_chapter_without_its_checks_is_red():
    found = compare.compare(run(), run(keep=CHAPTERS[1:]))
    assert found.red and len(found.lost) == 20 and {each.kind for each in found.lost} == {"lost"}
    assert not compare.compare(run(keep=CHAPTERS[1:]), run()).red, "more checks are no loss"


def test_wider_bands_are_red_and_narrower_ones_are_told():
    assert kinds(run(lambda entry: entry | {"band": [-1e9, 1e9]})) == {"bands"}
    assert kinds(run(lambda entry: entry | {"band": [0.0, None]})) == {"bands"}
    narrow = compare.compare(run(), run(lambda entry: entry | {"band": [0.2, 0.8]}))
    assert not narrow.red and len(narrow.lost) == 100


def test_a_mean_whose_resolution_grows_is_red_and_whose_band_moves_is_not():
    def of(resolution, band):
        return run(lambda entry: entry | {"form": "mean", "resolution": resolution, "band": list(band)})

    assert kinds(of(0.1, (0.1, 0.9)), of(0.1, (0.0, 1.0))) == set() == kinds(of(0.1, (-9, 9)), of(0.1, (0.0, 1.0)))
    assert kinds(of(0.2, (0.0, 1.0)), of(0.1, (0.0, 1.0))) == {"bands"}


def test_fewer_samples_are_red():
    assert kinds(run(lambda entry: entry | {"n": 1})) == {"samples"}
    many = run(lambda entry: entry | {"samples": 1000})
    assert kinds(run(lambda entry: entry | {"samples": 1}), many) == {"samples"} == kinds(run(), many)


def test_time_and_memory_beyond_their_factors_are_red_on_the_same_hardware():
    assert kinds(run(seconds=600.0)) == {"time"} and kinds(run(mb=9000.0)) == {"memory"}
    assert kinds(run(seconds=80.0, mb=1000.0)) == set() == kinds(run(seconds=600.0), time=20.0)
    other = compare.compare(run(), run(seconds=600.0, hardware="another"))
    assert not other.red and {each.kind for each in other.lost} == {"time"}


def test_values_that_moved_to_the_edge_together_are_red_and_one_alone_is_told():
    assert kinds(run(lambda entry: entry | {"measured": 0.999})) == {"edges"}
    one = compare.compare(run(), run(lambda e: e | {"measured": 0.999} if e["check"] == "check 3" else e))
    assert not one.red and {each.kind for each in one.lost} == {"edges"}


def test_a_red_run_and_its_copy_have_nothing_new():
    red = run(lambda entry: entry | {"measured": 2.0, "holds": False})
    found = compare.compare(red, red)
    assert not found.red and compare.conclusion(found).startswith("GREEN: nothing new, both are red alike")


def keep(tmp_path, name, metrics):
    folder = tmp_path / name
    folder.mkdir()
    (folder / "metrics.json").write_text(json.dumps(metrics))
    return str(folder)


def test_the_command_writes_json_and_junit(tmp_path, capsys):
    a, b = keep(tmp_path, "a", run()), keep(tmp_path, "b", run(keep=CHAPTERS[1:], seconds=600.0))
    files = {name: tmp_path / f"found.{name}" for name in ("json", "junit")}
    assert main(["report", a, b, *(x for name, file in files.items() for x in (f"--{name}", str(file)))]) == 1
    assert "RED: 0 verdict(s) differ, 0 check(s) hold in one run only, lost: 20, time: 6" in capsys.readouterr().out
    found = json.loads(files["json"].read_text())
    assert found["red"] and len(found["findings"]) == 26
    suite = ElementTree.parse(files["junit"]).getroot()
    assert suite.tag == "testsuite" and int(suite.get("tests")) == len(suite) == len(gate.WATCHED)
    failed = {case.get("name"): case.find("failure").text.splitlines() for case in suite if len(case)}
    assert {name: len(lines) for name, lines in failed.items()} == {"lost": 20, "time": 6}
    assert int(suite.get("failures")) == 2
    assert main(["report", a, a]) == 0


def test_the_trend_has_every_run_in_order(tmp_path):
    runs = [keep(tmp_path, str(i), run(seconds=60.0 * i, started=f"2026-01-0{4 - i}", commit=f"commit{i}"))
            for i in (1, 2, 3)]  # fmt: skip
    changed = run(started="2026-02-01", commit="last")
    changed["verdicts"]["claim-01-chapter"] = "refuted"
    runs.append(keep(tmp_path, "4", changed))
    assert main(["trend", *runs, "--out", str(tmp_path / "trend.html")]) == 0
    page = (tmp_path / "trend.html").read_text()
    assert [page.index(name) for name in ("commit3", "commit2", "commit1", "last")] == sorted(
        page.index(name) for name in ("commit1", "commit2", "commit3", "last")
    )
    body = page[page.index("<svg") :]
    assert 'role="img"' in body and "CPU minutes from 15.0 to 5.0" in body
    assert "<td>claim-01-chapter</td><td>confirmed</td><td>confirmed</td><td>confirmed</td><td>refuted</td>" in body
    assert "<td>01-chapter</td><td>180</td><td>120</td><td>60</td><td>60</td>" in body
    asked = re.findall(r"(?:src|href)=.(?!#)|url\((?!#)|@import", page)
    assert not asked, "the page asks nothing of the network"
    with pytest.raises(ValueError, match="at least two runs"):
        trend.write([tmp_path / "1"], tmp_path / "x.html")
