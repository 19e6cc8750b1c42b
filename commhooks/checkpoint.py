"""What of a hook's state is saved, what it fits, and how it is carried over to another number of ranks.

A state dict holds plain numbers, strings and tensors:

    format, state, world_size, step     of which this is
    config                              {option: text}
    parameters                          {name: text of shape, strides and dtype}
    common                              {memory: {parameter: tensor}}, the same on every rank
    rank<r>                             this rank's own {memory: {parameter: tensor}} and byte counters

Ranks' own parts have keys of their own, because `torch.distributed.checkpoint` saves equal keys once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from commhooks.bucket import Slice

if TYPE_CHECKING:
    from commhooks.state import HookState

StateDict = dict[str, Any]
FORMAT = 1
SHOWN = 10  # differences


@dataclass(frozen=True)
class Model:
    """What a state knows of the model it serves.

    Args:
        parameters: those that have gradients.
        dtypes: of the parameters, by name.
        strides: likewise: in which order a gradient's elements lie.
        device: of all of them.
        rank, world_size: in the model's process group.
    """

    parameters: tuple[Slice, ...]
    dtypes: Mapping[str, torch.dtype]
    strides: Mapping[str, tuple[int, ...]]
    device: torch.device
    rank: int
    world_size: int

    def described(self) -> dict[str, str]:
        return {
            x.name: f"shape {tuple(x.shape)}, strides {self.strides[x.name]}, {self.dtypes[x.name]}"
            for x in self.parameters
        }


def save(state: "HookState", model: Model) -> StateDict:
    """The state dict of `state`."""
    own = {name: memory.state_dict(model.parameters, model.dtypes, model.device) for name, memory in state.own.items()}
    for tensors in own.values():
        for x in tensors.values():
            x.div_(state.loss_scale)
    common = {
        name: memory.state_dict(model.parameters, model.dtypes, model.device) for name, memory in state.common.items()
    }
    return {
        "format": FORMAT,
        "state": type(state).__name__,
        "world_size": model.world_size,
        "step": state.step,
        "config": _texts(state.config()),
        "parameters": model.described(),
        "common": common,
        _part(model.rank): own | {"counters": state.counters()},
    }


def check(state: "HookState", saved: StateDict) -> None:
    """Raise ValueError if `saved` is not one of a state like `state`."""
    _check_format(saved)
    _refuse(state, _differences({"state": type(state).__name__}, {"state": saved["state"]}))
    _refuse(state, _differences(_texts(state.config()), saved["config"]))


def load(state: "HookState", model: Model, saved: StateDict) -> None:
    """Bring `state` to where `saved` was. Raises ValueError if it is another model's, or another rank's."""
    if saved["world_size"] != model.world_size:
        _refuse(
            state,
            [f"world_size is {saved['world_size']} in it and {model.world_size} here: see commhooks.reshard"],
        )
    if _part(model.rank) not in saved:
        parts = [key for key in saved if key.startswith("rank")]
        _refuse(state, [f"it is of {', '.join(parts)}; this is rank {model.rank}: every rank loads its own"])
    _refuse(state, _differences(model.described(), saved["parameters"]))
    own = saved[_part(model.rank)]
    for name, memory in state.own.items():
        memory.load_state_dict(own[name], model.device)
    for name, memory in state.common.items():
        memory.load_state_dict(saved["common"][name], model.device)
    state.resume_at(saved["step"], own["counters"])


def reshard(state_dicts: Sequence[StateDict], new_world_size: int) -> list[StateDict]:
    """The state dicts of all ranks, carried over to another number of ranks.

    A mean over W ranks is sum / W, so what all ranks together owe is sum of residuals / W. Each new rank gets the mean
    of the old ranks' residuals: the same is owed by the new ones.

    Args:
        state_dicts: `state.state_dict()` of every rank, in any order.
        new_world_size: W'.

    Returns:
        The state dicts for rank 0 to W' - 1.

    Raises:
        ValueError: they are not of all ranks of one run at one step, or `new_world_size` is below 1.
    """
    if isinstance(new_world_size, bool) or not isinstance(new_world_size, int) or new_world_size < 1:
        raise ValueError(f"new_world_size is {new_world_size!r}; it must be an integer of at least 1")
    _check_complete(state_dicts)
    first = state_dicts[0]
    parts = [x[_part(_rank(x))] for x in sorted(state_dicts, key=_rank)]
    mean = {name: {key: _mean([part[name][key] for part in parts]) for key in parts[0][name]} for name in parts[0]}
    shared = {key: value for key, value in first.items() if not key.startswith("rank")}
    return [
        shared | {"world_size": new_world_size, _part(rank): {name: _copied(x) for name, x in mean.items()}}
        for rank in range(new_world_size)
    ]


def _check_format(saved: StateDict) -> None:
    if saved.get("format") != FORMAT:
        raise ValueError(f"this is no state dict of a commhooks state of format {FORMAT}: its keys are {list(saved)}")


def _check_complete(state_dicts: Sequence[StateDict]) -> None:
    if not state_dicts:
        raise ValueError("state_dicts is empty; it must have those of all ranks")
    first = state_dicts[0]
    for saved in state_dicts:
        _check_format(saved)
        for key in ("state", "world_size", "step", "config", "parameters"):
            if saved[key] != first[key]:
                raise ValueError(f"state_dicts are of different runs or steps: {key} is {first[key]} and {saved[key]}")
    ranks = sorted(_rank(saved) for saved in state_dicts)
    if ranks != list(range(first["world_size"])):
        raise ValueError(f"state_dicts are of ranks {ranks}; they must be of all {first['world_size']}, each once")


def _mean(values: Sequence[Any]) -> Any:
    if not isinstance(values[0], Tensor):
        return sum(values) / len(values)
    total = values[0].cpu().double()  # each rank may have saved it from a GPU of its own
    for x in values[1:]:
        total += x.cpu()
    return (total / len(values)).to(values[0].dtype)


def _copied(values: dict[str, Any]) -> dict[str, Any]:
    return {key: x.clone() if isinstance(x, Tensor) else x for key, x in values.items()}


def _part(rank: int) -> str:
    return f"rank{rank}"


def _rank(saved: StateDict) -> int:
    return next(int(key.removeprefix("rank")) for key in saved if key.startswith("rank"))


def _texts(config: Mapping[str, object]) -> dict[str, str]:
    return {name: repr(value) for name, value in config.items()}


def _differences(here: Mapping[str, str], saved: Mapping[str, str]) -> list[str]:
    return [
        f"{name}: {saved.get(name, 'nothing')} in it, {here.get(name, 'nothing')} here"
        for name in dict.fromkeys([*here, *saved])
        if here.get(name) != saved.get(name)
    ]


def _refuse(state: "HookState", differences: list[str]) -> None:
    if differences:
        more = [f"and {len(differences) - SHOWN} more"] if len(differences) > SHOWN else []
        listed = "; ".join([*differences[:SHOWN], *more])
        raise ValueError(f"the state dict does not fit this {type(state).__name__}: {listed}")
