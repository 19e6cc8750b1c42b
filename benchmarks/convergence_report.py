"""What the convergence runs say: Markdown for RESULTS.md, and plots."""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.ticker import FormatStrFormatter, NullFormatter

from benchmarks.convergence_curves import at_step, reach, seconds_on_link, smooth, spread, verdict
from benchmarks.convergence_rank import NO_COMMUNICATION, VARIANTS
from benchmarks.convergence_task import BASELINE, BASELINES, TaskRecords, look_up_all
from benchmarks.records import Record
from benchmarks.rig import parse_rate
from benchmarks.tables import Table
from benchmarks.tasks import TASKS

NEVER = "not reached"
GOAL, GOAL_RATE = 1 / 5, "100mbit"  # of bf16's time, and where
FRACTIONS = {"a third": 1 / 3, "two thirds": 2 / 3, "all": 1.0}  # of bf16's run

HOW = """\
`python -m benchmarks.convergence`. Two ranks train from each seed's own start. Losses are those of held-out data,
each the mean of the last five evaluations. The learning rate is the best of a grid for bf16, with a seed of its
own, and every hook has the same. DDP's buckets are what suits each: 1 MB for plain DDP and bf16, 5 MB for the others.
AdamW is torch's fused one. A hook's goal is the loss that bf16 has, with the same seed, at the end of its run. The
steps and bytes to it are read off the hook's own curve, and never extrapolated. Numbers are medians over the seeds,
with the least and the largest in brackets.

Seconds are derived: steps times the median step on a link of that rate, all hooks measured in turn, and the link's
time for what a warm-up sends besides. `x bf16` is a hook's time over bf16's, seed by seed: where the brackets
enclose 1 there is no difference to speak of."""


def section(records: Sequence[Record]) -> str:
    """The results as a section of RESULTS.md."""
    parts = ["## Convergence", HOW]
    for task in look_up_all(records):
        parts += _task_section(task)
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def _task_section(task: TaskRecords) -> list[str]:
    seeds = f"{len(task.seeds)} seeds" if len(task.seeds) > 1 else "one seed"
    tuning = ", ".join(f"{loss:.3f} at {lr:g}" for lr, loss in sorted(task.tuning.items()))
    parts = [
        f"### {TASKS[task.name].label}",
        f"bf16 runs for {task.steps} steps; {seeds}. Learning rate {task.lr[BASELINE]:g}: bf16 came to {tuning}.",
        _loss_table(task).markdown(),
        _controls(task),
    ]
    if task.step_seconds:
        parts += [_time_table(task).markdown(), *(_reading(task, rate) for rate in task.step_seconds)]
        parts += [_goals_table(task).markdown(), _checks(task)]
    return parts


def _loss_table(task: TaskRecords) -> Table:
    columns = ["hook", "loss", "accuracy %", "MB a step", "steps to bf16's loss", "MB to it"]
    table = Table(f"After {task.steps} steps, and on the way to bf16's loss", columns)
    for name, curves in task.curves.items():
        reached = [task.reached(name, seed) for seed in task.seeds]
        steps = spread([x.step if x else None for x in reached])
        sent = spread([x.sent / 1e6 if x else None for x in reached])
        known = sum(x is not None for x in reached)
        table.rows.append(
            [
                VARIANTS[name].label,
                f"{spread([at_step(task.steps, curve, 'loss') for curve in curves.values()]):.3f}",
                f"{spread([at_step(task.steps, curve, 'accuracy') * 100 for curve in curves.values()]):.1f}",
                f"{median(curve['bytes'][-1] / curve['step'][-1] for curve in curves.values()) / 1e6:.3f}",
                f"{steps:.0f}" if steps else f"{NEVER} by {len(reached) - known} of {len(reached)}",
                f"{sent:.1f}" if sent else "",
            ]
        )
    return table


def _time_table(task: TaskRecords) -> Table:
    columns = ["hook"]
    for rate in task.step_seconds:
        columns += [f"{rate}: step ms", "s to bf16's loss", "x bf16"]
    table = Table("Time to bf16's loss", columns)
    for name in [*(x for x in BASELINES if x in task.curves), *task.hooks()]:
        row = [VARIANTS[name].label]
        for rate in task.step_seconds:
            total, ratios = spread(task.seconds(name, rate)), task.ratios(name, rate)
            row.append(f"{task.step_time(name, rate) * 1e3:.1f}")
            row += [f"{total:.1f}" if total else NEVER, f"{ratios:.2f}" if ratios else ""]
        table.rows.append(row)
    alone = ["no communication"]
    for seconds in task.step_seconds.values():
        alone += [f"{median(seconds[NO_COMMUNICATION]) * 1e3:.1f}", "", ""]
    table.rows.append(alone)
    return table


def _goals_table(task: TaskRecords) -> Table:
    """The same for losses that bf16 has earlier: whether a hook falls behind in the long run."""
    rate = next(iter(task.step_seconds))
    columns = ["hook", *(f"after {name} of its steps" for name in FRACTIONS)]
    table = Table(f"Time over bf16's at {rate}, to the loss that bf16 has", columns)
    for name in task.hooks():
        ratios = [task.ratios(name, rate, fraction) for fraction in FRACTIONS.values()]
        table.rows.append([VARIANTS[name].label, *(f"{x:.2f}" if x else NEVER for x in ratios)])
    return table


def _reading(task: TaskRecords, rate: str) -> str:
    """In words: the best hook at a rate, and what may be said of it."""
    measured = f"{rate} ({task.link_rates[rate] / 1e6:.0f} Mbit/s measured)"
    best = task.best(rate)
    ratios = best and task.ratios(best, rate)
    if not best or not ratios:
        return f"At {measured} no hook reaches bf16's loss with every seed in the steps it was given."
    text = f"At {measured} the soonest is {VARIANTS[best].label}, in {ratios:.2f} of bf16's time: {verdict(ratios)}."
    if rate == GOAL_RATE:
        met = "met" if ratios.middle <= GOAL else "missed"
        text += f" The goal, at most {GOAL:g}, is {met}."
    return text


def _controls(task: TaskRecords) -> str:
    """What happens without error feedback, beside the same hook with it."""
    sentences = []
    for name in task.curves:
        partner = VARIANTS[name].timed_as
        if not VARIANTS[name].control or partner not in task.curves:
            continue
        without, fed_back = (
            spread([at_step(task.steps, curve, "loss") for curve in task.curves[x].values()]) for x in (name, partner)
        )
        if without and fed_back:
            outcome = "it fails" if without.least > fed_back.most else "on this task that makes no difference"
            outcome = "it does better" if without.most < fed_back.least else outcome
            sentences.append(f"{VARIANTS[name].label}: {without:.3f}, with feedback {fed_back:.3f}; {outcome}.")
    return f"The control: losses after {task.steps} steps. " + " ".join(sentences) if sentences else ""


def _checks(task: TaskRecords) -> str:
    """Derived seconds beside those of a whole run on the link."""
    columns = ["hook", "link", "seconds derived", "seconds measured", "error"]
    table = Table("The check: whole runs on the link, to bf16's loss, with one seed", columns)
    whole = []
    for record in task.checks:
        case, curve = record["case"], record["measured"]
        derived = task.reached(case["variant"], case["seed"], case["rate"])
        real = reach(task.target(case["seed"]), curve, curve["seconds"])
        numbers = ["", NEVER, ""]
        if derived and real and derived.seconds and real.seconds:
            whole.append(real.seconds)
            error = derived.seconds / real.seconds - 1
            numbers = [f"{derived.seconds:.1f}", f"{real.seconds:.1f}", f"{error * 100:+.0f} %"]
        table.rows.append([VARIANTS[case["variant"]].label, case["rate"], *numbers])
    if not table.rows:
        return ""
    words = ""
    if len(whole) == 2:
        words = f"\nFrom start to end, {table.rows[1][0]} took {whole[1] / whole[0]:.2f} of bf16's time."
    return table.markdown() + words


def plot(records: Sequence[Record], folder: Path) -> list[Path]:
    """One picture a task: held-out loss against steps, bytes, and seconds on the first link."""
    mpl.use("Agg")
    tasks = [task for task in look_up_all(records) if task.step_seconds]
    for task in tasks:
        _plot(task, folder / _plot_name(task))
    return [folder / _plot_name(task) for task in tasks]


def _plot(task: TaskRecords, path: Path) -> None:
    rate = next(iter(task.step_seconds))
    bits = parse_rate(rate) or float("inf")
    figure, axes = plt.subplots(1, 3, figsize=(14, 4.5), sharey=True, layout="constrained")
    colors = [*mpl.colormaps["tab20"].colors]  # type: ignore[attr-defined]  # a listed map has them
    for color, (name, curves) in zip(colors, task.curves.items(), strict=False):
        first = next(iter(curves.values()))
        loss = [median(values) for values in zip(*(smooth(curve["loss"]) for curve in curves.values()), strict=True)]
        seconds = seconds_on_link(first, task.step_time(name, rate), bits)
        style = "--" if name in BASELINES else ":" if VARIANTS[name].control else "-"
        for axis, x in zip(axes, (first["step"], [x / 1e6 for x in first["bytes"]], seconds), strict=True):
            axis.plot(x[1:], loss[1:], style, color=color, label=VARIANTS[name].label)
    for axis in axes[1:]:
        axis.set_xscale("log")
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.xaxis.set_major_formatter(FormatStrFormatter("%g"))
    axes[0].set_yscale("log")
    for formatted in (axes[0].yaxis.set_major_formatter, axes[0].yaxis.set_minor_formatter):
        formatted(FormatStrFormatter("%g"))
    for axis in axes:
        axis.axhline(mean(task.target(seed) for seed in task.seeds), color="black", linewidth=0.6)
    axes[0].set(xlabel="steps", ylabel="held-out loss, median over seeds")
    axes[1].set(xlabel="MB sent by a rank")
    axes[2].set(xlabel=f"seconds at {rate}")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", fontsize="small")
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _plot_name(task: TaskRecords) -> str:
    return f"convergence-{task.name}.png"
