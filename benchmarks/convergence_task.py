"""One task's convergence records, looked up by what they are, and what follows from them."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

from benchmarks.convergence_curves import Curve, Reached, Spread, final_loss, reach, seconds_on_link, smooth, spread
from benchmarks.convergence_rank import VARIANTS
from benchmarks.records import Record
from benchmarks.rig import parse_rate

BASELINE = "bf16"
BASELINES = ("plain", BASELINE)


@dataclass
class TaskRecords:
    """Of one task.

    `curves` by variant and seed; `step_seconds` by link rate and variant; `link_rates` as measured, by the rate asked
    for; `tuning`: bf16's final loss by learning rate; `lr`: each variant's learning rate; `checks`: records of whole
    runs on a link.
    """

    name: str
    curves: dict[str, dict[int, Curve]] = field(default_factory=dict)
    step_seconds: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    link_rates: dict[str, float] = field(default_factory=dict)
    tuning: dict[float, float] = field(default_factory=dict)
    lr: dict[str, float] = field(default_factory=dict)
    checks: list[Record] = field(default_factory=list)

    @property
    def seeds(self) -> list[int]:
        return list(self.curves[BASELINE])

    @property
    def steps(self) -> int:
        """Of bf16's run."""
        return int(self.curves[BASELINE][self.seeds[0]]["step"][-1])

    def target(self, seed: int, fraction: float = 1) -> float:
        """The smoothed loss that bf16 has after this fraction of its run."""
        losses = smooth(self.curves[BASELINE][seed]["loss"])
        return losses[round(fraction * (len(losses) - 1))]

    def step_time(self, variant: str, rate: str) -> float:
        """Median seconds."""
        return median(self.step_seconds[rate][VARIANTS[variant].timed_as or variant])

    def reached(self, variant: str, seed: int, rate: str | None = None, fraction: float = 1) -> Reached | None:
        """What the variant had spent when it came to the target; seconds only at a rate."""
        curve = self.curves[variant].get(seed)
        if curve is None:
            return None
        seconds = None
        if rate is not None:
            seconds = seconds_on_link(curve, self.step_time(variant, rate), parse_rate(rate) or float("inf"))
        return reach(self.target(seed, fraction), curve, seconds)

    def seconds(self, variant: str, rate: str, fraction: float = 1) -> list[float | None]:
        """To the target, for each seed."""
        reached = [self.reached(variant, seed, rate, fraction) for seed in self.seeds]
        return [x.seconds if x else None for x in reached]

    def ratios(self, variant: str, rate: str, fraction: float = 1) -> Spread | None:
        """Seconds over bf16's, seed by seed. None if it does not reach the target with every seed."""
        pairs = zip(self.seconds(variant, rate, fraction), self.seconds(BASELINE, rate, fraction), strict=True)
        return spread([x / y if x and y else None for x, y in pairs])

    def hooks(self) -> list[str]:
        """The variants that compete with the baselines."""
        return [x for x in self.curves if x not in BASELINES and not VARIANTS[x].control]

    def best(self, rate: str) -> str | None:
        """The hook that is soonest at bf16's loss, by the median; of those that reach it with every seed."""
        ratios = {x: self.ratios(x, rate) for x in self.hooks()}
        reaching = {x: ratio.middle for x, ratio in ratios.items() if ratio}
        return min(reaching, key=lambda x: reaching[x], default=None)


def look_up(records: Iterable[Record], name: str) -> TaskRecords:
    """All records of the task."""
    task = TaskRecords(name)
    for record in records:
        case, measured = record["case"], record["measured"]
        if case.get("task") != name:
            continue
        match case["part"]:
            case "tune":
                task.tuning[case["lr"]] = final_loss(measured)
            case "train":
                task.curves.setdefault(case["variant"], {})[case["seed"]] = measured
                task.lr[case["variant"]] = case["lr"]
            case "time":
                task.step_seconds[case["rate"]] = measured["seconds"]
                task.link_rates[case["rate"]] = measured["link_rate"]
            case "check":
                task.checks.append(record)
    return task


def look_up_all(records: Iterable[Record]) -> list[TaskRecords]:
    """Every task for which bf16 has run."""
    records = list(records)
    names = dict.fromkeys(record["case"]["task"] for record in records if "task" in record["case"])
    return [task for task in (look_up(records, name) for name in names) if BASELINE in task.curves]
