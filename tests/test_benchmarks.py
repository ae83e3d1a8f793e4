"""The benchmarks' own arithmetic, how cost grows, and their tables. The timings themselves are ``make bench``."""

import json
import os

import numpy as np
import pytest

from benchmarks import __main__ as command
from benchmarks import book, gpu, growth, timing, walk
from benchmarks.growth import Curve, exponent
from nbutils.trainings import recipes_lm
from workflow import ROOT, speed


def test_a_row_is_the_median_over_turns_with_its_spread():
    made = timing.row("a pair", [1.0, 4.0, 2.0], [30.0, 40.0, 40.0], bound=20, aim=40)
    assert (made["ours_s"], made["plain_s"], made["ratio"]) == (2, 40, 20)
    assert (made["ratio_min"], made["ratio_max"], made["turns"], made["aim"]) == (10, 30, 3, 40)
    assert made["holds"] and not timing.row("a pair", [1.0], [19.0], bound=20)["holds"]


def test_a_pair_with_its_own_clock_gets_ratio_and_verdict():
    made = timing.finished({"what": "a pair", "ours_s": 2.0, "plain_s": 3.0, "bound": 2})
    assert made["ratio"] == 1.5 and not made["holds"]


def test_turns_alternate_and_a_share_of_the_work_counts_whole():
    order = []
    made = timing.compare(
        "a pair", lambda: order.append(1), lambda: (order.append(2), sum(range(10**5))), 1, share=0.01, repeats=3
    )
    assert order == [1, 2] * 3
    assert made["plain_s"] > 100 * 1e-4, "a hundredth of the work was timed, 0.1 ms at least"


def test_different_walks_are_seen(monkeypatch):
    walk.agree(n=100, steps=50)
    monkeypatch.setattr(walk, "stepwise", lambda *a: 1.05 * STEPWISE(*a))
    with pytest.raises(AssertionError, match="disagree"):
        walk.agree(n=1000, steps=50)


STEPWISE = walk.stepwise


def test_exponent_of_a_power_and_its_interval():
    sizes = np.array([1, 2, 4, 8, 16, 32])
    assert exponent(sizes, 3.0 * sizes**1.5) == pytest.approx((1.5, 1.5, 1.5))
    rng, covered = np.random.default_rng(0), 0
    for _ in range(400):
        p = exponent(sizes, sizes**0.7 * np.exp(0.1 * rng.standard_normal(6)))
        covered += p.low < 0.7 < p.high
    assert 0.92 < covered / 400 < 0.98
    with pytest.raises(ValueError, match="all positive"):
        exponent(sizes, sizes - 1)


def grown(what, sizes):
    """A curve of the benchmark at fewer and smaller sizes."""
    return growth.measure(next(curve for curve in growth.CURVES if curve.what == what)._replace(sizes=sizes))


def test_the_exponent_of_memory_is_given_where_there_is_some():
    room = Curve("room", "size", (10**6, 2 * 10**6, 4 * 10**6), lambda n, _: lambda: np.ones(5 * n))
    made = growth.measure(room)
    assert made["memory_exponent"] == pytest.approx(1, abs=0.1), "four times as much for four times the size"
    none = growth.measure(Curve("none", "size", (1, 2, 4), lambda n, _: lambda: sum(range(n * 10**5))))
    assert "memory_exponent" not in none
    rows = [row | MADE_ON for row in (made, none)]
    shown = [line.split("|")[-2].strip() for line in speed.exponents(rows).splitlines()[2:4]]
    assert shown == [f"{made['memory_exponent']:.2f}", "–"]


@pytest.mark.slow
@pytest.mark.parametrize("name", command.MODULES)
def test_every_pair_runs_and_its_sides_agree(name, monkeypatch):
    """One turn each: what they assert of their two sides is what counts here, not the time."""
    once = timing.interleaved
    for module in (timing, command.trainings):
        monkeypatch.setattr(module, "interleaved", lambda sides, repeats=1: once(sides, 1))
    for row in command.pairs([name]):
        assert row["ratio"] > 0 and {"what", "bound", "holds", "load"} <= set(row)


def test_a_planted_square_is_measured():
    square = Curve("a square", "size", (200, 400, 800), lambda n, _: lambda: sum(1 for _ in range(n) for _ in range(n)))
    made = growth.measure(square)
    assert 1.5 < made["exponent"] < 2.5  # neither 1 nor 3; it takes no memory, so the caches do not bend it
    room = Curve("room", "size", (10**6, 2 * 10**6, 4 * 10**6), lambda n, _: lambda: np.ones(10 * n))
    assert growth.measure(room)["peak_mb"] > 300, "4·10⁷ numbers of 8 bytes"


def test_the_walk_does_not_pay_for_time():
    """A factor of a million in t: at most a factor of two in cost. Stepping pays in full."""
    assert abs(grown("random walk, 20 walks, n = 10⁴", (10**3, 10**6, 10**9))["exponent"]) < 0.05
    assert grown("the same, step by step", (8, 16, 32))["exponent"] > 0.6


def test_checkpoints_cost_their_bytes_and_no_memory():
    """Four times as many checkpoints, or as large ones: less than 4 MB more, where one has 8 MB or more."""
    for what, sizes in (("series of checkpoints of 8 MB", (2, 4, 8)), ("series of 2 checkpoints", (16, 32, 64))):
        made = grown(what, sizes)
        assert made["exponent"] < 1.3, what  # no lower bound: what a file costs at any size makes it smaller
        assert made["peak_mb"] - made["peak_mb_first"] < 4, what


def test_a_process_that_ends_early_is_told():
    with pytest.raises(RuntimeError, match=r"doomed: the process for size = 7"):
        growth.point(Curve("doomed", "size", (7,), lambda n, _: lambda: os._exit(3)), 7)


def test_jupyter_book_executes_the_same_notebooks_in_the_same_profile(monkeypatch):
    """Its notebooks have our cells, without outputs, and the parameters that papermill would give."""
    seen = {}
    monkeypatch.setattr(book, "jupyter_book", lambda where, notebooks, execute: seen.update(notebooks) or execute)
    assert book.executed_by_jupyter_book(ROOT, book.SOME) == "force"
    for name in book.SOME:
        cells, ours = seen[name].cells, book.executable(ROOT / "book" / f"{name}.md").cells
        changed = [(a.source, b.source) for a, b in zip(cells, ours, strict=True) if a.source != b.source]
        assert [new for new, _ in changed] == [book.PARAMETERS]
        assert 'profile = "auto"' in changed[0][1]
        assert not any(cell.get("outputs") for cell in cells)


@pytest.mark.slow
def test_whole_runs_of_a_small_book(project):
    """Both sides run, their checks come out alike, and nothing changed costs less than everything."""
    made = {row["what"].split(",")[0]: row for row in book.rows((), turns=1, root=project)}
    assert set(made) == {"all chapters", "whole book", "one chapter edited (01-one)"}
    assert made["whole book"]["ratio"] > 2 and made["all chapters"]["plain_cpu_s"] > 1


def test_other_checks_on_the_two_sides_are_seen(project, monkeypatch):
    """Jupyter Book would skip a chapter that raises, and be fast."""
    monkeypatch.setattr(book, "workflow", lambda *a: book.Took(1, 1))
    monkeypatch.setattr(book, "jupyter_book", lambda *a: book.Took(1, 1))
    outcomes = iter([[("one", "a number", True)], []])
    monkeypatch.setattr(book, "outcome", lambda path: next(outcomes))
    monkeypatch.setattr(book, "rendered", lambda *a: book.Took(1, 1))
    with pytest.raises(AssertionError, match="01-one: the checks of the two sides differ"):
        book.cold(project, ["01-one"])


def test_throughput_counts_tokens_and_six_operations_a_parameter():
    size = recipes_lm.size("smoke")
    made = gpu.throughput(size, steps=40, device="cpu")
    assert made.tokens_per_s * made.seconds == pytest.approx(40 * size.batch * size.length)
    net = recipes_lm.Size(10, 8, 1, 2, 4, 2, steps=0, warmup=0, every=1, dev=0, text=0)
    one = gpu.throughput(net, steps=30, device="cpu")
    weights = 10 * 8 + 4 * 8 + 12 * 8 * 8  # embedding, positions, a block's matrices; gains, shifts and biases besides
    assert weights < one.flops / one.tokens_per_s / 6 < weights + 30 * 8
    assert made.norm.low <= made.norm.p <= made.norm.high
    with pytest.raises(ValueError, match="30 or more"):
        gpu.throughput(size, steps=10, device="cpu")


ROW = {"what": "a pair", "ratio": 0.5, "ratio_min": 0.4, "ratio_max": 0.6, "turns": 3, "bound": 2, "holds": False}
MADE_ON = {"hardware": "a processor", "versions": {"python": "3.11.7", "torch": "2.13.0"}}


def test_kept_rows_replace_those_of_their_name(tmp_path, monkeypatch):
    monkeypatch.setattr(command.device, "hardware", lambda device: "a processor")
    file = tmp_path / "bench.json"
    command.keep("pairs", [ROW, ROW | {"what": "another"}], file)
    command.keep("pairs", [ROW | {"ratio": 3.0}], file)
    kept = json.loads(file.read_text())["pairs"]
    assert [(row["what"], row["ratio"], row["hardware"]) for row in kept] == [
        ("a pair", 3.0, "a processor"),
        ("another", 0.5, "a processor"),
    ]


def test_the_table_says_where_ours_is_slower_and_where_the_machine_was_busy():
    busy = ROW | MADE_ON | {"what": "a run", "ratio": 2.5, "holds": True, "turns": 1, "clock": "wall", "load": 8.0}
    text = speed.ratios([ROW | MADE_ON, busy])
    assert "| a pair | 0.5 (0.4–0.6) | 2 | **does not hold**, and slower |" in text
    assert "| a run | 2.5 | 2 | holds; by the clock of a busy machine, load 8.0 a core |" in text
    assert text.count("a processor") == 1
    assert speed.ratios([]) == speed.NONE == speed.exponents([])


def test_kept_benchmarks_make_tables():
    for kind, table in (("pairs", speed.ratios), ("curves", speed.exponents)):
        if rows := speed.kept(kind):
            assert len(table(rows).splitlines()) == len(rows) + 4
