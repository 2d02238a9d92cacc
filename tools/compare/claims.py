"""Whether runs show what was published, decided by fixed rules on the numbers.

A verdict is about the runs of a report: a small model on a small task neither reproduces nor refutes a claim about
large ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_gspo.tools.compare.run_records import Run, mean_of
from megatron_gspo.tools.compare.statistics import Difference, interval, paired_difference
from megatron_gspo.tools.compare.study import Study, rows, values
from megatron_gspo.tools.compare.study_plan import BASE

PRIMARY = "final_accuracy"
SEEN = "seen here"
NOT_SEEN = "not seen here"
PARTLY = "in part"
UNTESTED = "not tested here"
UNDECIDED = "not decided"
EQUAL = 0.05  # "as good as" must exclude a loss of more than 5 points


@dataclass(frozen=True)
class Claim:
    """A published claim, the verdict, and the numbers behind it, one sentence each."""

    claim: str
    verdict: str
    evidence: list[str]


def claims(study: Study) -> list[Claim]:
    """All claims of the report, in a fixed order."""
    deciders: tuple[Callable[[Study], Claim], ...] = (
        _grpo_needs_replay,
        _gspo_needs_none,
        _gspo_learns_better,
        _gspo_clips_more,
        _experts_change,
        _engines_differ,
        _no_recompute,
        _token_variant_equal,
    )
    return [decide(study) for decide in deciders]


def expectations(study: Study) -> list[Claim]:
    """Whether the differences that the comparison file expects came about."""
    found = []
    for item in study.expected:
        higher, lower = study.label(item.higher), study.label(item.lower)
        claim = f"{higher} ends at least {item.points:g} points above {lower}."
        ends = [values(study, BASE, name, PRIMARY) for name in (item.higher, item.lower)]
        seeds = sorted(ends[0].keys() & ends[1].keys())
        if not seeds:
            found.append(Claim(claim, UNTESTED, ["They have no seed in common."]))
            continue
        difference = sum(ends[0][seed] - ends[1][seed] for seed in seeds) / len(seeds)
        pairs = "; ".join(f"{percent(ends[0][seed])} and {percent(ends[1][seed])} with seed {seed}" for seed in seeds)
        evidence = [f"{higher} less {lower}: {100 * difference:+.1f} points, mean over seeds ({pairs})."]
        found.append(Claim(claim, SEEN if difference >= item.points / 100 else NOT_SEEN, evidence))
    return found


def role(run: Run) -> tuple[str, str, str]:
    """(algorithm, replay, old log-probs) of a run's config."""
    algorithm = run.config.get("algorithm", {})
    replay = run.config.get("routing", {}).get("replay", "none")
    return str(algorithm.get("name", "")), str(replay), str(algorithm.get("old_log_probs", "recompute"))


def find(study: Study, *, name: str, replay: str = "none", old: str = "recompute") -> str | None:
    """The first variant with this role, None where there is none."""
    for group in study.groups:
        for run in study.runs:
            if run.variant == group.name and run.config and role(run) == (name, replay, old):
                return group.name
    return None


def percent(value: float | None, digits: int = 1) -> str:
    return "?" if value is None else f"{100 * value:.{digits}f} %"


def describe(difference: Difference) -> str:
    """`+2.1 points (95 % interval -0.3 to +4.5, 5 seeds, p 0.07)`; p is of the paired t-test, uncorrected."""
    text = f"{100 * difference.mean:+.1f} points ("
    if difference.low is not None and difference.high is not None:
        text += f"95 % interval {100 * difference.low:+.1f} to {100 * difference.high:+.1f}, "
    seeds = f"{difference.count} seed" + ("s" if difference.count > 1 else "")
    return text + seeds + (")" if difference.p_t is None else f", p {p_value(difference.p_t)})")


def p_value(p: float | None) -> str:
    if p is None:
        return "-"
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def _grpo_needs_replay(study: Study) -> Claim:
    claim = "On a mixture of experts, GRPO needs Routing Replay to converge."
    plain = find(study, name="grpo")
    replayed = [name for kind in ("r2", "r3") if (name := find(study, name="grpo", replay=kind))]
    if plain is None or not replayed:
        return Claim(claim, UNTESTED, ["There are no runs of GRPO with and without replay."])
    evidence, helped, needed = [], [], 0
    for setting in study.settings:
        found = {row.group: row for row in rows(study, setting.name)}
        if plain not in found or not any(name in found for name in replayed):
            continue
        total, well = len(found[plain].by_seed), found[plain].converged
        if not total:
            continue
        line = f"{_words(study, setting.name)}: {well} of {total} plain GRPO runs converged"
        for name in (name for name in replayed if name in found):
            others, other = len(found[name].by_seed), found[name].converged
            needed += well < total / 2 and other > others / 2
            line += f"; {study.label(name)} {other} of {others}"
            difference = _compare(study, setting.name, name, plain)
            if difference is not None:
                if difference.low is not None and difference.low > 0:
                    helped.append(_words(study, setting.name))
                line += f", accuracy at the end {describe(difference)} against plain GRPO"
        evidence.append(line + ".")
    if not evidence:
        return Claim(claim, UNTESTED, ["No setting has runs of GRPO with and without replay."])
    evidence.append("Converged: finished, not collapsed, and above its initial accuracy.")
    if helped and not needed:
        where = ", ".join(dict.fromkeys(name[0].lower() + name[1:] for name in helped))
        evidence.append(f"Replay ended higher {where}, but plain GRPO converged too, so the claim is not seen here.")
    return Claim(claim, SEEN if needed else NOT_SEEN, evidence)


def _gspo_needs_none(study: Study) -> Claim:
    claim = "GSPO trains stably without Routing Replay."
    name = find(study, name="gspo")
    if name is None:
        return Claim(claim, UNTESTED, ["There are no runs of GSPO without replay."])
    evidence, good, whole = [], 0, 0
    for setting in study.settings:
        row = next((row for row in rows(study, setting.name) if row.group == name), None)
        if row is None or not row.by_seed:
            continue
        whole += 1
        total, well = len(row.by_seed), row.converged
        good += well == total
        fall = max((item.largest_fall or 0.0 for item in row.by_seed.values()), default=0.0)
        evidence.append(
            f"{_words(study, setting.name)}: {well} of {total} runs converged, {row.broken} failed or collapsed; the "
            f"largest drop of the accuracy below a run's best was {100 * fall:.1f} points."
        )
    verdict = UNTESTED if not whole else SEEN if good == whole else PARTLY if good else NOT_SEEN
    return Claim(claim, verdict, evidence)


def _gspo_learns_better(study: Study) -> Claim:
    claim = "At the same compute GSPO learns faster and ends higher than GRPO."
    gspo, grpo = find(study, name="gspo"), find(study, name="grpo", replay="r2") or find(study, name="grpo")
    plain = find(study, name="grpo")
    if gspo is None or grpo is None:
        return Claim(claim, UNTESTED, ["The report has no runs of both."])
    evidence, verdicts = [], []
    for reference in dict.fromkeys(name for name in (plain, grpo) if name):
        for measure, words in ((PRIMARY, "accuracy at the end"), ("mean_accuracy", "mean accuracy over the run")):
            difference = _compare(study, BASE, gspo, reference, measure)
            if difference is None:
                continue
            verdicts.append(_direction(difference))
            evidence.append(
                f"{_words(study, BASE)}, {words}: GSPO {describe(difference)} against {study.label(reference)}."
            )
    if not verdicts:
        return Claim(claim, UNTESTED, ["They have no seed in common."])
    up, down = verdicts.count(1), verdicts.count(-1)
    if down:
        evidence.append("At least one of these intervals is entirely below 0: GSPO was worse there.")
    verdict = SEEN if up == len(verdicts) else NOT_SEEN if not up else PARTLY
    return Claim(claim, verdict, evidence)


def _gspo_clips_more(study: Study) -> Claim:
    claim = "GSPO clips two orders of magnitude more tokens than GRPO (published: 15 % against 0.13 %)."
    gspo, grpo = find(study, name="gspo"), find(study, name="grpo")
    ours, theirs = (_metric(study, name, "clip_fraction/tokens") if name else None for name in (gspo, grpo))
    if ours is None or theirs is None:
        return Claim(claim, UNTESTED, ["There are no clip fractions of both."])
    factor = ours / theirs if theirs else float("inf")
    evidence = [
        f"{_words(study, BASE)}, GSPO clipped {percent(ours, 2)} of the tokens and GRPO {percent(theirs, 2)}: "
        f"{factor:.1f} times as many, each with the clip range listed under settings."
    ]
    verdict = SEEN if factor >= 30 else PARTLY if factor > 1 else NOT_SEEN
    return Claim(claim, verdict, evidence)


def _experts_change(study: Study) -> Claim:
    claim = "About 10 % of the activated experts change after an update, for the same tokens (48 layers, 8 of 128)."
    rates = {name: _metric(study, name, "routing/flip_rate") for name in _unreplayed(study)}
    found = {name: value for name, value in rates.items() if value is not None}
    if not found:
        return Claim(claim, UNTESTED, ["No run recorded expert flips."])
    evidence = [
        f"{study.label(name)}: {percent(value)} of the experts changed, mean over the updates of a step; "
        f"{percent(_metric(study, name, 'routing/flipped_tokens'))} of the tokens had a flip in at least one layer."
        for name, value in found.items()
    ]
    low, high = min(found.values()), max(found.values())
    verdict = SEEN if 0.05 <= low and high <= 0.2 else PARTLY if high >= 0.01 else NOT_SEEN
    return Claim(claim, verdict, evidence)


def _engines_differ(study: Study) -> Claim:
    claim = (
        "With separate engines about 10 % of the router decisions differ between rollout and training, and 94 % of the "
        "tokens in at least one layer."
    )
    found, evidence = [], []
    for setting in study.settings:
        for group in study.groups_in(setting.name):
            rate = _metric(study, group.name, "routing/rollout_flip_rate", setting.name)
            if rate is None:
                continue
            runs = study.of(setting.name, group.name)
            dtypes = sorted({str(run.config.get("model", {}).get("dtype")) for run in runs if run.config})
            tokens = _metric(study, group.name, "routing/rollout_flipped_tokens", setting.name)
            share = "" if tokens is None else f", {percent(tokens, 3)} of the tokens"
            place = f"{_words(study, setting.name)}, {group.label}, both engines in {' and '.join(dtypes)}"
            evidence.append(f"{place}: {percent(rate, 3)} of the decisions{share}.")
            found.append(rate)
    if not found:
        return Claim(claim, UNTESTED, ["No run recorded the routes of both engines."])
    high = max(found)
    return Claim(claim, SEEN if high >= 0.05 else PARTLY if high >= 0.01 else NOT_SEEN, evidence)


def _no_recompute(study: Study) -> Claim:
    claim = "GSPO can use the rollout engine's log-probs without recomputing them."
    plain, without = find(study, name="gspo"), find(study, name="gspo", old="rollout")
    if plain is None or without is None:
        return Claim(claim, UNTESTED, ["There are no runs of GSPO with both kinds of old log-probs."])
    evidence, worse, wide = [], 0, 0
    for setting in study.settings:
        difference = _compare(study, setting.name, without, plain)
        if difference is None or difference.low is None or difference.high is None:
            continue
        line = f"{_words(study, setting.name)}, accuracy at the end: {describe(difference)} against recomputed ones"
        mismatch = _metric(study, plain, "mismatch/abs_diff_max", setting.name)
        if mismatch is not None:
            line += f"; the engines' log-probs differed by at most {mismatch:.1e} nats (mean of the steps' largest)"
        row = next(row for row in rows(study, setting.name) if row.group == without)
        worse += difference.high < 0 or row.broken > len(row.by_seed) / 2
        wide += difference.low < -EQUAL
        evidence.append(line + ".")
    if not evidence:
        return Claim(claim, UNTESTED, ["Fewer than two seeds have both."])
    verdict = NOT_SEEN if worse == len(evidence) else PARTLY if worse else UNDECIDED if wide else SEEN
    return Claim(claim, verdict, evidence + _too_wide(wide))


def _token_variant_equal(study: Study) -> Claim:
    claim = "GSPO-token with equal advantages is GSPO."
    plain, token = find(study, name="gspo"), find(study, name="gspo_token")
    if plain is None or token is None:
        return Claim(claim, UNTESTED, ["The report has no runs of both."])
    difference = _compare(study, BASE, token, plain)
    if difference is None:
        return Claim(claim, UNTESTED, ["They have no seed in common."])
    evidence = [
        f"{_words(study, BASE)}, accuracy at the end: {describe(difference)}. The two are equal in exact arithmetic; "
        "runs diverge by rounding after some steps."
    ]
    if difference.low is None or difference.high is None:
        return Claim(claim, UNDECIDED, evidence)
    apart = difference.low > 0 or difference.high < 0
    wide = difference.low < -EQUAL or difference.high > EQUAL
    return Claim(claim, NOT_SEEN if apart else UNDECIDED if wide else SEEN, evidence + _too_wide(wide))


def _too_wide(count: int) -> list[str]:
    return [f"An interval that exceeds {100 * EQUAL:.0f} points is not conclusive."] if count else []


def _compare(study: Study, setting: str, variant: str, reference: str, measure: str = PRIMARY) -> Difference | None:
    return paired_difference(values(study, setting, variant, measure), values(study, setting, reference, measure))


def _direction(difference: Difference) -> int:
    """1 or -1 where the interval excludes 0, else 0."""
    if difference.low is None or difference.high is None:
        return 0
    return 1 if difference.low > 0 else -1 if difference.high < 0 else 0


def _metric(study: Study, group: str, metric: str, setting: str = BASE) -> float | None:
    """Mean over the steps, then over the seeds."""
    found: Sequence[Any] = [mean_of(run, metric) for run in study.of(setting, group)]
    known = [value for value in found if value is not None]
    return interval(known).mean if known else None


def _unreplayed(study: Study) -> list[str]:
    return [
        group.name
        for group in study.groups
        if any(run.variant == group.name and run.config and role(run)[1] == "none" for run in study.runs)
    ]


def _words(study: Study, setting: str) -> str:
    """Where a figure was measured."""
    if setting != BASE:
        return f"Under {setting}"
    perturbed = any(run.config.get("router_noise", {}).get("stress_test") for run in study.of(BASE, study.baseline))
    return "With perturbed routers" if perturbed else "Without stress"
