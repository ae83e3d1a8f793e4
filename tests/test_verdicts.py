"""Equal logic has equal verdicts, and what counters a claim of the paper stands under that claim."""

import ast
from collections.abc import Iterator
from itertools import combinations

import pytest

from workflow import book

# Claims with one logic, and what it is.
EQUAL = {
    "exponential on each ray, uniform away from ties or zeros, and near them at no norm": (
        "theorem4 theorem5 lemma7 theorem7 theorem8 "
        "encoder-degree encoder-published definition3 classifier-degree euler-approximate"
    ),
    "the leading terms must not cancel, and generic ones do not": "theorem1 prop2 any-network lemma5",
    "one condition that the text lacks repairs each, and the generic case holds": "theorem1 theorem4 theorem5 lemma5",
    "right within a condition that the text lacks, and false on an open set beyond it": (
        "theorem4 theorem8 f-monotone"
    ),
    "a bound in |x| or |f| itself, whatever its direction": "lemma6 lemma8 theorem2 theorem3",
    "no condition beyond those of the parts": "lemma2 lemma3 lemma4 table1-approximate",
    "exact wherever a layer norm has a value": "table1-layernorm table1-layernorm-affine table1-at-zero",
    "read for each c, as the proof of Lemma 4 and the published gloss do": "definition4 lemma4",
    "similar, as said, but for a rate": "bias-puzzle fig4-biases",
    "of the published figure, whatever its models had for a mask": "heads-split heads-local fig4-values",
    "what the printed models did, of which nothing is kept": "heads-global lm-lookahead fig4-printed lm-wd-level",
    "a slip of the pen, and right as meant": "walk-recursion walk-middle step-orthogonal theorem2 saturated-argmax",
    "what is concluded fails for nearly all inputs or functions": (
        "theorem6 bias-before-norm theorem9 norm-converges fig5-homogeneous"
    ),
    "what is concluded fails on an open set of data and parameters": "equilibrium-stops norm-converges",
    "of the curves drawn, by the median of random draws": "fig1-100 fig1-80 fig1-equilibrium fig1-variants",
    "exact for plain descent, and Adam breaks both": "diagnostic si-monotone",
    "of most blocks, and the first and the last bend away": "t5-uniform t5-layers-sqrt",
    "in the reading that the text names: of this θ, of scalars, of plain steps, from near 0": (
        "part-or-all uniform-direction aligned-start si-monotone diagnostic"
    ),
    "of the repository's tables, and one word or number of the sentence fails there": (
        "t5-alignment t5-step-size t5-sqrt-whole t5-layers-sqrt"
    ),
    "of the repository's curves, and they have what the sentence says": (
        "t5-sqrt t5-neighbour-cosine lm-saturation t5-misaligned"
    ),
    "of each of a few that are named, and one or two are exceptions": "lm-curves pretrained-level t5-layers-sqrt",
    "the repository's code does not do what its name says": "t5-encoder-only lm-causal lm-pplx fig4-switch",
    "right by the measure that the sentence names": "lm-saturation saturated-exchange fig4-values",
    "of pretrained models, of which no series and no population is at hand": (
        "pretrained-saturated longer-saturates small-saturate-more growth-guides"
    ),
    "false at a positive share of inputs or draws": "step-functions theorem6",
    "right on each ray or at given margins, and between them not on an open set": "f-monotone equilibrium-grows",
    "the repository does not tell what was printed": "t5-printed-encoder fig4-printed lm-growth-four lm-lookahead",
}


# Two claims of which one at most can be true.
CONTRARY = {"growth of the matrices ends below a decay of 0.01, and goes on there": ("lm-wd-level", "lm-usual-decay")}
# What two such claims may be: one true and one false, or one or both not decided for all that is meant.
CONTRARY_VERDICTS = (["confirmed", "refuted"], ["confirmed", "open"], ["open", "open"], ["open", "partly confirmed"])


@pytest.mark.parametrize(("logic", "names"), CONTRARY.items())
def test_contrary_claims_have_contrary_verdicts(logic, names):
    verdicts = [book.claims()[name]["expected"] for name in names]
    assert sorted(verdicts) in CONTRARY_VERDICTS, f"{logic}: {verdicts}"


@pytest.mark.parametrize(("logic", "names"), EQUAL.items())
def test_equal_logic_has_equal_verdicts(logic, names):
    verdicts = {name: book.claims()[name]["expected"] for name in names.split()}
    assert len(set(verdicts.values())) == 1, f"{logic}: {verdicts}"


# Claims of ours that narrow a claim of the paper: this one is not *confirmed*.
NARROWS = {
    "not-uniform": "theorem5",
    "aligned-log": "assumption1",
    "fig1-ray": "equilibrium-grows",
    "stack-sign": "larger-networks",
    "mpnet-unsaturated": "pretrained-level",
}
# Claims of ours that leave the paper's claim nearest to them as it is, with the reason.
BESIDE = {
    "exchange-predicts": ("saturated-exchange", "of predictions, where that is of cosines"),
    "growth-against-turning": ("growth-guides", "small models, where that is of pretrained ones"),
    "small-early": ("longer-saturates", "small models, where that is of pretrained ones"),
    "saturated-or-collapsed": ("lm-saturation", "what a level of 1.00 means"),
    "walk-general-steps": ("walk-sqrt", "Eq. 5 is of Gaussian steps"),
    "si-growth": ("si-monotone", "√t is a bound there"),
    "si-optimizers": ("si-monotone", "it is of gradient descent"),
    "si-epsilon": ("si-projection", "ε is outside of a scale-invariant loss"),
    "diagnostic-adaptive": ("diagnostic", "it is of methods like gradient descent"),
    "t5-encoder-only": ("t5-printed-encoder", "the repository's curve, where that is the printed one"),
    "t5-zero-drift": ("t5-projection-zero", "of θ·∇L, and open"),
    "t5-alignment": ("t5-printed-encoder", "the repository's tables, where that is of the printed figures"),
    "t5-step-size": ("t5-printed-encoder", "the repository's tables, where that is of the printed figures"),
    "t5-interval-budget": ("t5-printed-encoder", "of intervals, as the printed figures are"),
    "t5-drift-share": ("t5-printed-encoder", "an inference that the paper does not draw"),
    "misaligned-schedule": ("misaligned", "of other schedules than T5's"),
    "lm-growth": ("lm-usual-decay", "at every rate, where that is *probable*, and allows for other hyperparameters"),
    "optimizer-sqrt": ("misaligned", "of noise under another optimizer"),
    "encoder-null": ("t5-sqrt", "a curve of growth, whatever its cause"),
    "embedding-tied": ("embedding-obscures", "of T5's, where that is of embeddings that are updated infrequently"),
    "t5-own": ("t5-sqrt", "small networks, not T5-base"),
    "lm-over-noise": ("lm-growth-four", "growth, whatever its cause"),
    "lm-threshold": ("lm-lr-wd", "a formula for the same decay; its runs are judged there as well"),
    "lm-curves": ("lm-growth-four", "the repository's curves, of another norm"),
    "lm-causal": ("lm-lookahead", "the released mask, and that is of the published models"),
    "lm-pplx": ("prenorm-better", "a footnote withdraws the perplexities"),
    "lm-untrained": ("lm-saturation", "of the start, where that is of the end"),
    "graph-asymptotic": ("graph-degree", "of components for which the table has no rule"),
    "graph-converse": ("graph-degree", "a degree is only *potentially* undefined where a component has none"),
    "encoder-real": ("encoder-published", "other placements of the norm"),
    "fig4-switch": ("fig4-printed", "of the repository's figure, where that is the printed one"),
    "equilibrium-tail": ("equilibrium-grows", "how fast"),
    "fitting-grows-more": ("better-grows-more", "*in certain contexts*, and these are others"),
    "multiclass": ("theorem3", "that is of two classes"),
    "fig1-gain": ("fig1-80", "which part of the curve is whose"),
    "larger-script": ("larger-networks", "of the script, with random labels"),
    "lm-projection": ("larger-networks", "of training, where that is of scaling"),
    "false-stop": ("norm-converges", "of rounding"),
    "minilm-equal-norm": ("fig4-order", "another model, and at equal norm"),
    "smollm2-unsaturated": ("fig4-order", "another model, above its untrained shape"),
    "trained-own": ("pretrained-saturated", "other models, and that is open"),
    "massive-centred": ("", "of a measure of ours"),
    "trained-below-permuted": ("fig4-order", "other models, and at equal norm"),
    "random-common": ("fig4-random-zero", "why"),
    "t5-random-level": ("fig4-random-zero", "of the exception that it names"),
    "heads-mask": ("heads-global", "of the released mask, where that is of the published models, and open"),
    "heads-usual": ("heads-split", "our networks with the usual mask, where that is of the printed figure"),
    "heads-between": ("heads-split", "of heads that are neither"),
    "counting-near-ties": ("heads-count", "what heads can do, not what trained ones do"),
    "counting-found": ("heads-count", "what heads can do, not what training finds"),
    "saturated-dyck": ("counter-languages", "more of the same"),
    "trained-saturated": ("capacity-conjecture", "of single networks, and open"),
    "own-series": ("", "of checkpoints"),
    "own-mask": ("", "of a library"),
    "own-degree": ("classifier-degree", "another placement of the norm"),
    "own-exponents": ("walk-sqrt", "one loop, its law and a rising rate"),
    "ray-kills": ("pretrained-saturated", "of predictions, and that is open"),
    "ray-encoder": ("pretrained-saturated", "of predictions, and that is open"),
    "ray-temperature": ("", "the control of the ray"),
    "stream-balance": ("", "of what scaling does"),
    "hard-attention-keeps": ("capacity-conjecture", "of a single network, and that is open"),
    "trained-heads-single": ("heads-split", "large trained models, where that is of small ones"),
    "sink-unsaturated": ("heads-split", "of heads that are not saturated"),
    "small-keep-function": ("saturated-exchange", "of predictions, where that is of cosines"),
    "learned-survives": ("saturated-exchange", "another placement, and of what is learned"),
    "today-scores": ("theorem7", "other architectures"),
    "today-qk-norm": ("theorem7", "other architectures"),
    "today-soft-cap": ("theorem7", "other architectures"),
    "today-stream": ("encoder-degree", "other architectures"),
    "today-router": ("", "of experts"),
    "today-ray": ("pretrained-saturated", "of untrained networks, and that is open"),
    "today-bf16": ("", "of rounding"),
    "today-bf16-scaled": ("", "of rounding"),
    "today-z-loss": ("", "of another loss"),
    "today-balance": ("", "of noise under two optimizers"),
    "today-sqrt": ("t5-sqrt", "other models and optimizers, not T5"),
    "today-shuffled": ("lm-growth-four", "growth, whatever its cause"),
    "today-decay": ("lm-usual-decay", "a decay 200 times the usual one"),
    "today-bound": ("", "of attention that the paper's models do not have"),
    "today-gains": ("", "of attention that the paper's models do not have"),
    "today-sharper": ("saturated-or-collapsed", "other networks, and of their heads"),
    "today-saturates": ("saturated-or-collapsed", "networks of another form"),
}


def test_a_claim_of_ours_says_what_it_does_to_the_paper():
    """So that a counterexample cannot stand under a claim of ours while the claim that it counters stays confirmed."""
    claims = book.claims()
    ours = {name for name, claim in claims.items() if claim.get("ours")}
    assert ours ^ (NARROWS.keys() | BESIDE.keys()) == set(), (
        "a claim of ours narrows a claim of the paper or is beside it"
    )
    for name, narrowed in NARROWS.items():
        assert not claims[narrowed].get("ours")
        assert claims[narrowed]["expected"] != "confirmed", f"{name} counters it: its counterexample belongs there"
    assert all(nearest in claims for nearest, _ in BESIDE.values() if nearest)


# ---- one value under two claims ----

Check = tuple[str, str, str]  # measured expression, claim, role


def checks_in(cell: str) -> Iterator[Check]:
    """The checks of a cell whose claim and role it spells out; a role in ``**options`` is not seen, and is ``""``."""
    for node in ast.walk(ast.parse(cell)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and len(node.args) > 2):
            continue
        if node.func.attr.startswith("check") and isinstance(node.args[0], ast.Constant):
            options = {keyword.arg: keyword.value for keyword in node.keywords}
            role = options.get("role", ast.Constant("" if None in options else "stated"))
            written = str(role.value) if isinstance(role, ast.Constant) else ""
            yield ast.unparse(node.args[2]), str(node.args[0].value), written


def filed_apart(cell: str, verdicts: dict[str, str]) -> list[tuple[Check, Check]]:
    """Pairs of checks on one value: a counterexample or a correction under one claim, and another that is confirmed."""
    pairs = []
    for one, other in combinations(checks_in(cell), 2):
        for against, spared in ((one, other), (other, one)):
            same = against[0] == spared[0] and against[1] != spared[1]
            if same and against[2] in ("counterexample", "corrected") and verdicts.get(spared[1]) == "confirmed":
                pairs.append((against, spared))
    return pairs


@pytest.mark.parametrize("chapter", book.chapters())
def test_one_value_does_not_counter_a_claim_and_spare_another(chapter):
    verdicts = {name: claim["expected"] for name, claim in book.claims().items()}
    assert [pair for cell in book.code_cells(chapter) for pair in filed_apart(cell, verdicts)] == []


def test_a_value_that_is_filed_apart_is_found():
    cell = 'claims.check("a", "x", error, (0, 1), kind="exact")\n'
    cell += 'claims.check("b", "y", error, (2, 3), kind="exact", role="counterexample", claimed=0)\n'
    assert filed_apart(cell, {"a": "confirmed", "b": "refuted"}) == [
        (("error", "b", "counterexample"), ("error", "a", "stated"))
    ]
    assert filed_apart(cell, {"a": "partly confirmed", "b": "refuted"}) == []
