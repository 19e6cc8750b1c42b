"""What ties a hook's state to the DDP model it serves: its group, its parameters' names, its buckets' layouts."""

import gc
from collections.abc import Callable
from weakref import WeakKeyDictionary, ref

import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.weak import WeakIdKeyDictionary

from commhooks.agreement import agree, configuration
from commhooks.bucket import Bucket, Layout, Slice, lay_out
from commhooks.checkpoint import Model
from commhooks.executor import Inline, Pipelined
from commhooks.state import HookState


class Binding:
    """A state at work for one model.

    Args:
        state: the hook's state.
        ddp: the model; None if it is not known, as under a wrapper that keeps the state to itself. The state must
            name a process group then.

    Raises:
        ValueError: the state's group has other ranks than the model's.
    """

    def __init__(self, state: HookState, ddp: DDP | None, device: torch.device) -> None:
        group = state.process_group
        if group is None and ddp is not None:
            group = ddp.process_group
        if group is None:
            raise ValueError(
                f"process_group of this {type(state).__name__} is None, and no DDP model is known to use it: "
                "register the hook with commhooks.register, or give the state the model's process group"
            )
        if ddp is not None:
            check_group(group, ddp)
        self.ddp = None if ddp is None else ref(ddp)
        self._state = state
        self._names = {} if ddp is None else {id(p): name for name, p in ddp.module.named_parameters()}
        state.spares_unused = ddp is not None and ddp.find_unused_parameters and not ddp.static_graph
        if ddp is not None:
            state.attach(describe(ddp, group))
        elif state.is_loading:
            raise ValueError(
                "a state dict was loaded, but no DDP model is known that it could be compared with: "
                "register the hook with commhooks.register"
            )
        self._layouts: dict[int, Layout] = {}
        inline = state.executor == "inline" or (state.executor == "auto" and device.type == "cuda")
        self.executor = (Inline if inline else Pipelined)(state, group, device)

    def is_alive(self) -> bool:
        """False once the model is gone: the state may serve another, whose parameters of the same names go on."""
        return self.ddp is None or self.ddp() is not None

    def is_joining(self) -> bool:
        """Is the model inside `Join`, on every rank?"""
        return self.ddp is not None and self.model()._join_config.enable

    def agree(self, problem: str | None) -> None:
        """Compare the state with the other ranks'. Raises on all of them what is wrong on any."""
        if self.ddp is not None:
            agree(self.model(), configuration(self._state), problem)
        elif problem:
            raise ValueError(problem)

    def model(self) -> DDP:
        """The model.

        Raises:
            ValueError: it is not known.
        """
        model = self.ddp() if self.ddp is not None else None
        if model is None:
            raise ValueError("no DDP model is known to use this state: register the hook with commhooks.register")
        return model

    def bucket(self, grad_bucket: dist.GradBucket) -> Bucket:
        """DDP's bucket as ours.

        Raises:
            ValueError: a parameter in it is not the model's.
        """
        index, is_last = grad_bucket.index(), grad_bucket.is_last()
        parameters = grad_bucket.parameters()
        layout = self._layouts.get(index)
        if layout is None or not layout.holds(parameters):
            layout = self._layouts[index] = lay_out(
                index, [(p, self._name(p, index, i), memory_shape(p)) for i, p in enumerate(parameters)]
            )
        if is_last:
            self._layouts = {i: x for i, x in self._layouts.items() if i <= index}
        return Bucket(layout, grad_bucket.buffer(), is_last)

    def _name(self, parameter: torch.Tensor, bucket: int, position: int) -> str:
        if self.ddp is None:
            return f"parameter {position} of bucket {bucket}"
        name = self._names.get(id(parameter))
        if name is None:
            raise ValueError(
                f"a hook's state serves one DDP model, but a parameter of shape {tuple(parameter.shape)} came "
                "that its model does not have: make one state for each model"
            )
        return name


def bind(state: HookState, ddp: DDP) -> Binding:
    """Let `state` serve `ddp`.

    Raises:
        ValueError: it serves another model already, or its group has other ranks than the model's.
    """
    if state.binding is not None and state.binding.is_alive():
        raise ValueError(one_model_only(state))
    state.binding = binding = Binding(state, ddp, next(ddp.module.parameters()).device)
    return binding


def find_and_bind(state: HookState, hook: str, device: torch.device) -> Binding:
    """Let `state` serve the model that registered it. All ranks do so in the same hook call.

    Raises:
        ValueError: several models did; or its group has other ranks than the model's; or the ranks differ in hook,
            options or parameters.
    """
    models = find_models(lambda ddp: any(s is state for _, s in ddp._comm_hooks))
    if len(models) > 1:
        raise ValueError(one_model_only(state))
    if models:
        return _bind_on_all_ranks(state, hook, models[0])
    state.binding = binding = Binding(state, None, device)
    return binding


def _bind_on_all_ranks(state: HookState, hook: str, ddp: DDP) -> Binding:
    """Raises on all ranks what is wrong on any."""
    binding, problem = None, None
    try:
        binding = Binding(state, ddp, next(ddp.module.parameters()).device)
    except ValueError as error:
        problem = str(error)
    agree(ddp, {"hook": hook} | configuration(state), problem)
    state.binding = binding
    assert binding is not None  # else there is a problem
    return binding


# The states made for models whose hook was registered with None or a process group, and how to find the model of a
# bucket by its first parameter. Both let go of a model that nobody else holds.
_implicit_states: WeakKeyDictionary[DDP, HookState] = WeakKeyDictionary()
_models = WeakIdKeyDictionary()


def implicit_state(
    state_type: type[HookState], hook: str, group: dist.ProcessGroup | None, grad_bucket: dist.GradBucket
) -> HookState:
    """The state of a hook that was registered without one: made at the model's first bucket, then the same.

    Raises:
        ValueError: it is not clear which model the bucket comes from; or the ranks differ in hook or parameters.
    """
    parameter = grad_bucket.parameters()[0]
    model = _models[parameter]() if parameter in _models else None
    if model is None:
        models = find_models(lambda ddp: bool(ddp._comm_hooks) and any(p is parameter for p in ddp.parameters()))
        if len(models) != 1:
            raise ValueError(
                f"{len(models)} DDP models with a hook have the parameters of this bucket: "
                f"register the hook with a {state_type.__name__} instead of {group!r}"
            )
        model = models[0]
        _models[parameter] = ref(model)
    if model not in _implicit_states:
        state = state_type(process_group=group)
        _bind_on_all_ranks(state, hook, model)
        _implicit_states[model] = state
    return _implicit_states[model]


def find_models(wanted: Callable[[DDP], bool]) -> list[DDP]:
    """The DDP models alive for which `wanted` is true. Looks at every object once: 0.1 s or so."""
    return [x for x in gc.get_objects() if issubclass(type(x), DDP) and wanted(x)]


def check_group(group: dist.ProcessGroup, ddp: DDP) -> None:
    ranks, models = dist.get_process_group_ranks(group), dist.get_process_group_ranks(ddp.process_group)
    if ranks != models:
        raise ValueError(
            f"process_group has ranks {ranks}, but the DDP model was built over ranks {models}: "
            "give the state the model's group, or None"
        )


def one_model_only(state: HookState) -> str:
    return f"this {type(state).__name__} serves another DDP model already: make one state for each model"


def describe(ddp: DDP, group: dist.ProcessGroup) -> Model:
    """What a checkpoint needs to know of the model."""
    named = [(name, p) for name, p in ddp.module.named_parameters() if p.requires_grad]
    return Model(
        parameters=tuple(Slice(p, name, 0, memory_shape(p)) for name, p in named),
        dtypes={name: p.dtype for name, p in named},
        strides={name: p.stride() for name, p in named},
        device=next(ddp.module.parameters()).device,
        rank=dist.get_rank(group),
        world_size=dist.get_world_size(group),
    )


def memory_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """The shape as which the gradient lies in the bucket: DDP keeps a transposed matrix transposed."""
    shape = tuple(parameter.shape)
    if parameter.dim() == 2 and not parameter.is_contiguous() and parameter.t().is_contiguous():
        return shape[::-1]
    return shape
