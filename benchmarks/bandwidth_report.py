"""The bandwidth benchmark in words and tables, from its records alone."""

from collections.abc import Sequence

from benchmarks.bandwidth_numbers import Crossover, crossover, fastest, verdict
from benchmarks.bandwidth_rank import NO_SYNC, PHASES
from benchmarks.records import Record
from benchmarks.tables import Table
from benchmarks.variants import VARIANTS

BASES = ("plain", "bf16")
NO_HOOK = "no communication"
HOW = """\
Every hook trains the same GPT of 1.89M parameters, all in one group of processes, in turn (A B C A B C). Times are
medians of rounds; ± is the distance from the fastest round to the slowest, and a difference that is not larger is
called none. The floor is the longer of a step without communication and of the bytes at the interface, headers
included, over the measured rate. Exposed is what a step takes longer than one without communication. The phases are
of rank 0, in steps of their own under the profiler. The optimizer is torch's fused AdamW.
"""


def label(name: str) -> str:
    return NO_HOOK if name == NO_SYNC else VARIANTS[name].label if name in VARIANTS else name


def rate_words(rate: float) -> str:
    """Bit/s for people, to three digits."""
    return f"{rate / 1e9:.3g} Gbit/s" if rate >= 1e9 else f"{rate / 1e6:.3g} Mbit/s"


def title(launch: Record) -> str:
    case, rate = launch["case"], rate_words(launch["measured"]["link_rate"])
    asked = "unthrottled" if case["rate"] == "none" else f"{case['rate']} asked"
    ranks = "rank" if case["ranks_per_node"] == 1 else "ranks"
    return f"{case['nodes']} nodes x {case['ranks_per_node']} {ranks}, {asked}, {rate} measured"


def launches(records: Sequence[Record], shape: tuple[int, int] | None = None) -> list[Record]:
    """The launches, or those of one shape (nodes, ranks a node), by their measured rate; without hooks that are red."""
    found = [x for x in records if "rate" in x["case"]]
    if shape:
        found = [x for x in found if (x["case"]["nodes"], x["case"]["ranks_per_node"]) == shape]
    red = {hook for hook, measured in _tests(records).items() if not measured["green"]}
    found.sort(key=lambda x: (x["case"]["nodes"], x["case"]["ranks_per_node"], x["measured"]["link_rate"]))
    return [_without(red, launch) for launch in found]


def _tests(records: Sequence[Record]) -> dict[str, Record]:
    """What each hook's tests last said: a run that was continued has tested again."""
    return {x["case"]["tests"]: x["measured"] for x in records if "tests" in x["case"]}


def _without(hooks: set[str], launch: Record) -> Record:
    measured = launch["measured"]
    variants = {
        name: numbers
        for name, numbers in measured["variants"].items()
        if name not in VARIANTS or VARIANTS[name].hook not in hooks
    }
    return launch | {"measured": measured | {"variants": variants}}


def launch_table(launch: Record) -> Table:
    """Every variant of one launch."""
    variants = launch["measured"]["variants"]
    columns = ["hook", "step ms", "± ms", "floor ms", "exposed ms", "sent a step MB"]
    columns += [f"than {label(base)}" for base in BASES if base in variants]
    table = Table(title(launch), [*columns, *(f"{phase} ms" for phase in PHASES)])
    for name, found in variants.items():
        row = [label(name), f"{found['step_ms']:.1f}", f"{found['spread_ms']:.1f}", f"{found['floor_ms']:.1f}"]
        row += ["" if name == NO_SYNC else f"{found['exposed_ms']:.1f}", f"{found['tx_bytes_per_step'] / 1e6:.3f}"]
        row += [_against(variants, name, base) for base in BASES if base in variants]
        phases = found["phases_ms"]
        table.rows.append([*row, *(f"{phases[phase]:.1f}" if phases else "" for phase in PHASES)])
    return table


def _against(variants: dict[str, Record], name: str, base: str) -> str:
    if name in {base, NO_SYNC}:
        return ""
    said = verdict(variants[name]["rounds_ms"], variants[base]["rounds_ms"])
    if said == "no difference":
        return said
    ratio = variants[base]["step_ms"] / variants[name]["step_ms"]
    return f"{ratio:.2f} x faster" if said == "faster" else f"{1 / ratio:.2f} x slower"


def crossover_table(found: Sequence[Record]) -> Table:
    """Up to which rate each hook pays, on launches that differ in their rate alone."""
    table = Table("Up to which link rate a hook's step is shorter", ["hook", *(f"than {label(x)}'s" for x in BASES)])
    for name in _hooks(found):
        cells = ["" if name == base else crossover_words(crossover(found, name, base)) for base in BASES]
        table.rows.append([label(name), *cells])
    return table


def crossover_words(found: Crossover | None) -> str:
    if found is None:
        return "not measured"
    if found.pays_to is None:
        return "at none measured"
    if found.stops_at is None:
        return f"at all up to {rate_words(found.pays_to)}"
    between = f"{rate_words(found.pays_to)} yes, {rate_words(found.stops_at)} no"
    return f"about {rate_words(found.estimate)} ({between})" if found.estimate else between


def cost_table(found: Sequence[Record]) -> Table:
    """What each hook adds to plain DDP's step where the link is no limit."""
    free = [x for x in launches(found) if x["case"]["rate"] == "none" and "plain" in x["measured"]["variants"]]
    table = Table("Cost over plain DDP, unthrottled, ms a step", ["hook", *(title(x) for x in free)])
    for name in _hooks(free):
        table.rows.append([label(name), *(_cost(x["measured"]["variants"], name) for x in free)])
    return table


def _cost(variants: dict[str, Record], name: str) -> str:
    if name not in variants:
        return ""
    more = variants[name]["step_ms"] - variants["plain"]["step_ms"]
    said = verdict(variants[name]["rounds_ms"], variants["plain"]["rounds_ms"])
    return f"{more:+.1f} ({said})"


def losses(found: Sequence[Record]) -> Table:
    """Where a hook is slower than plain DDP or than bf16."""
    table = Table("Losses: measurably slower than", ["where", *(label(base) for base in BASES)])
    for launch in launches(found):
        variants = launch["measured"]["variants"]
        cells = ["; ".join(_slower(variants, base)) or "none" if base in variants else "" for base in BASES]
        table.rows.append([title(launch), *cells])
    return table


def _slower(variants: dict[str, Record], base: str) -> list[str]:
    return [label(x) for x in variants if x not in {base, *BASES, NO_SYNC} and "slower" in _against(variants, x, base)]


def reading(found: Sequence[Record]) -> list[str]:
    """Which hook for which link, a sentence a launch. By step time alone: what a step is worth is another question."""
    return [f"{title(launch)}: {_advice(launch['measured']['variants'])}" for launch in launches(found)]


def choices(records: Sequence[Record]) -> list[str]:
    """The reading in short: neighbouring rates with the same choice in one line. Two nodes, one rank each."""
    ranges: list[tuple[str, list[Record]]] = []
    for launch in launches(records, (2, 1)):
        choice = simplest(launch["measured"]["variants"])
        if not ranges or ranges[-1][0] != choice:
            ranges.append((choice, []))
        ranges[-1][1].append(launch["measured"])
    return [_choice_words(choice, found) for choice, found in ranges] or ["Not measured yet."]


def _choice_words(choice: str, found: list[Record]) -> str:
    rates = _span([measured["link_rate"] for measured in found])
    if choice == "plain":
        return f"{rates}: none (plain DDP)"
    level = [set(fastest(measured["variants"])) for measured in found]
    others = [label(name) for name in VARIANTS if name != choice and all(name in names for names in level)]
    return f"{rates}: {label(choice)}" + (f"; not measurably different: {'; '.join(others)}" if others else "")


def _span(rates: list[float]) -> str:
    return rate_words(rates[0]) if len(rates) == 1 else f"{rate_words(rates[0])} to {rate_words(rates[-1])}"


def simplest(variants: dict[str, Record]) -> str:
    """Of those that no other is measurably faster than: plain DDP, else bf16, else the one with the shortest step."""
    level = fastest(variants)
    return next((base for base in BASES if base in level), level[0])


def _advice(variants: dict[str, Record]) -> str:
    best, *level = fastest(variants)
    if "plain" in (best, *level):
        return f"no hook is measurably faster than plain DDP ({variants['plain']['step_ms']:.0f} ms a step). Use none."
    text = f"{label(best)} has the shortest step, {variants[best]['step_ms']:.0f} ms"
    bases = [base for base in BASES if base in variants and base != best]
    text += "".join(f"; {_against(variants, best, base)} than {label(base)}" for base in bases)
    return text + (f". No measurable difference from it: {'; '.join(map(label, level))}." if level else ".")


def left_out(records: Sequence[Record]) -> list[str]:
    """What has no number, and why."""
    said = [f"{hook}: no number, {x['reason']}" for hook, x in _tests(records).items() if not x["green"]]
    for launch in launches(records):
        measured = launch["measured"]
        said += [f"{label(name)}: refused by torch ({why})" for name, why in measured["refused"].items()]
        said += [f"{label(name)}, {title(launch)}: failed ({why})" for name, why in measured["failed"].items()]
    return list(dict.fromkeys(said))


def _hooks(found: Sequence[Record]) -> list[str]:
    names = dict.fromkeys(name for launch in found for name in launch["measured"]["variants"])
    return [name for name in names if name not in {NO_SYNC, "plain"}]


def section(records: Sequence[Record]) -> str:
    """The part of RESULTS.md about bandwidth, in Markdown."""
    passed = ", ".join(f"{hook} {x['passed']}" for hook, x in _tests(records).items() if x["green"])
    parts = ["## Bandwidth\n", HOW, f"Tests passed before the first number: {passed or 'none'}.\n"]
    if not launches(records):
        return "\n".join([*parts, "No launch was measured yet.\n"])
    parts.append("### Reading\n\n" + "\n".join(f"- {line}" for line in reading(records)) + "\n")
    if two := launches(records, (2, 1)):
        parts.append(crossover_table(two).markdown())
    if any(launch["case"]["rate"] == "none" for launch in launches(records)):
        parts.append(cost_table(records).markdown())
    parts.append(losses(records).markdown())
    if said := left_out(records):
        parts.append("Without a number:\n\n" + "\n".join(f"- {line}" for line in said) + "\n")
    parts.append("### Every launch\n")
    parts += [launch_table(launch).markdown() for launch in launches(records)]
    return "\n".join(parts)
