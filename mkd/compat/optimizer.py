"""Patches of Megatron's optimizers: resuming in fp32, with PyTorch's Adam, with SGD, with other learning rates, and
with experts on another number of ranks."""

from collections.abc import Iterable
from typing import Any


def resume_distributed_optimizer() -> None:
    """Make the distributed optimizer resume in fp32, and with PyTorch's Adam, as on CPU.

    megatron-core 0.19 writes into fp32 weights with autograd enabled. With PyTorch's Adam, moreover, saving asserts
    that the step counts of all parameters are equal, but before a load there are none; loading assigns one step tensor
    to all parameters, and each of them then increments it; and it reads the step count from the tensors of a parameter,
    where the fully reshardable format has none and the other format has the 0 from before the load.
    """
    import torch
    from megatron.core.optimizer import distrib_optimizer

    optimizer = distrib_optimizer.DistributedOptimizer
    if optimizer._set_main_param_and_optimizer_states.__module__ == __name__:
        return
    set_states = torch.no_grad()(optimizer._set_main_param_and_optimizer_states)
    if distrib_optimizer.HAVE_APEX_OR_TE:

        def set_states_without_grad(self: Any, model_param: Any, tensors: dict) -> None:
            set_states(self, model_param, tensors)

        optimizer._set_main_param_and_optimizer_states = set_states_without_grad
        return
    state_dict, load_state_dict = optimizer.state_dict, optimizer.load_state_dict

    def state_dict_before_load(self: Any) -> dict:
        if self.optimizer.state:
            return state_dict(self)
        self.optimizer.state["a placeholder"] = {"step": torch.zeros(())}
        try:
            return state_dict(self)
        finally:
            self.optimizer.state.clear()

    def load_separate_steps(self: Any, state: dict) -> None:
        load_state_dict(self, state)
        for values in self.optimizer.state.values():
            if "step" in values:
                values["step"] = values["step"].clone()

    def set_states_without_step(self: Any, model_param: Any, tensors: dict) -> None:
        set_states(self, model_param, {**tensors, "step": None})  # values that are not tensors are skipped

    optimizer.state_dict, optimizer.load_state_dict = state_dict_before_load, load_separate_steps
    optimizer._set_main_param_and_optimizer_states = set_states_without_step


def resume_sgd() -> None:
    """Make SGD resume.

    megatron-core 0.19 makes the state of an optimizer before it loads it, and has no function for this for SGD: a load
    ends in a TypeError.
    """
    from megatron.core.optimizer.optimizer import MegatronOptimizer

    if MegatronOptimizer.__init__.__module__ == __name__:
        return
    init = MegatronOptimizer.__init__

    def init_with_state(self: Any, optimizer: Any, config: Any, init_state_fn: Any = None) -> None:
        init(self, optimizer, config, init_state_fn or _make_momentum)

    MegatronOptimizer.__init__ = init_with_state


def _make_momentum(optimizer: Any, config: Any = None) -> None:
    """Momentum of 0 for each parameter that has none, with which the next step is that of a new optimizer."""
    import torch

    if config is None or config.optimizer != "sgd" or not config.sgd_momentum:
        return
    for group in optimizer.param_groups:
        for param in group["params"]:
            optimizer.state[param].setdefault("momentum_buffer", torch.zeros_like(param.data))


def save_before_the_first_update() -> None:
    """Make checkpoints whole that are saved before the optimizer has updated a weight, as when all steps so far
    overflowed in fp16.

    megatron-core 0.19 stores no state of the optimizer then, but reads one, so that such a checkpoint cannot be
    resumed; the fully reshardable format cannot even be saved. A step count of 0 is not stored either.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer

    if FP32Optimizer.sharded_state_dict.__module__ == __name__:
        return
    for kind in (FP32Optimizer, Float16OptimizerWithFloat16Params, DistributedOptimizer):
        kind.sharded_state_dict = _with_first_state(kind.sharded_state_dict)
    for kind in (FP32Optimizer, Float16OptimizerWithFloat16Params):
        kind.load_state_dict = _with_step_counts(kind.load_state_dict)


def _with_first_state(sharded_state_dict: Any) -> Any:
    def after_first_state(self: Any, model_state: Any, is_loading: bool = False, *more: Any, **options: Any) -> Any:
        if not is_loading and self.optimizer is not None and not self.optimizer.state:
            self.init_state_fn(self.optimizer, self.config)
            _count_steps(self.optimizer, self.optimizer.state.values())
        return sharded_state_dict(self, model_state, is_loading, *more, **options)

    return after_first_state


def _with_step_counts(load_state_dict: Any) -> Any:
    def load_with_step_counts(self: Any, state: Any) -> None:
        inner = _inner(state)["state"]
        if "common_step" not in inner:
            _count_steps(self.optimizer, inner.values())
        load_state_dict(self, state)

    return load_with_step_counts


def _count_steps(optimizer: Any, states: Iterable[dict]) -> None:
    """Let PyTorch's Adam, which keeps a step count for each parameter, begin at 0 where there is none."""
    import torch

    if isinstance(optimizer, torch.optim.Adam):
        for state in states:
            state.setdefault("step", torch.zeros(()))


def resume_experts_on_other_ranks() -> None:
    """Load the optimizer's state of experts that were distributed over ranks into a job with whole layers, and the
    reverse.

    megatron-core 0.19 has two optimizers with expert parallelism, one of the experts and one of the other parameters,
    and a single one without it. The tensors in a checkpoint are the same, but the parameter groups are stored for each
    optimizer, and loading expects as many as the job has.
    """
    from megatron.core.optimizer.optimizer import ChainedOptimizer

    if ChainedOptimizer.load_state_dict.__module__ == __name__:
        return
    load = ChainedOptimizer.load_state_dict

    def load_other_chain(self: Any, state: Any) -> None:
        load(self, _with_own_chain([one.optimizer for one in self.chained_optimizers], state))

    ChainedOptimizer.load_state_dict = load_other_chain


def _with_own_chain(optimizers: list[Any], state: Any) -> Any:
    """The state as for a job with these optimizers: `state` itself, or split or joined.

    Args:
        optimizers: PyTorch's optimizers.
        state: one state under "optimizer" or with "param_groups", or states under the numbers of the optimizers; one
            of the two is what the checkpoint has, the tensors that were read are where the job has them.
    """
    if not isinstance(state, dict):
        return state
    several = {key: value for key, value in sorted(state.items(), key=str) if isinstance(key, int)}
    single = {key: value for key, value in state.items() if not isinstance(key, int)}
    if len(optimizers) == 1 and several:
        stored = [group for part in several.values() for group in _inner(part)["param_groups"]]
        joined = _merged(next(iter(several.values())), single)
        _inner(joined)["param_groups"] = _groups_of(optimizers[0], stored)
        return joined
    if len(optimizers) > 1 and len(several) == len(optimizers) and "param_groups" in _inner(single):
        stored = _inner(single)["param_groups"]
        split = {number: _merged(single, part) for number, part in several.items()}
        for optimizer, part in zip(optimizers, split.values(), strict=True):
            _inner(part)["param_groups"] = _groups_of(optimizer, stored)
        return split
    return state


def _inner(state: dict) -> dict:
    """PyTorch's part of an optimizer's state; the optimizer of fp32 weights has no other part."""
    return state.get("optimizer", state)


def _merged(first: dict, second: dict) -> dict:
    """A new nested dict with the values of two; those of the second one replace equal keys of the first one."""
    merged = {}
    for key in (*first, *(key for key in second if key not in first)):
        value = second.get(key, first.get(key))
        if isinstance(value, dict):
            kept = first.get(key)
            value = _merged(kept if isinstance(kept, dict) else {}, value)
        merged[key] = value
    return merged


def _groups_of(optimizer: Any, stored: list[dict]) -> list[dict]:
    """For each group of an optimizer the stored group with the most equal identifiers, as one of the optimizer's."""
    from megatron.core.optimizer.optimizer import param_group_identifier_keys

    own = "is_expert_parallel"
    found = []
    for group in optimizer.state_dict()["param_groups"]:
        nearest = max(
            stored, key=lambda one: sum(one.get(key) == group.get(key) for key in param_group_identifier_keys)
        )
        found.append({**nearest, own: group.get(own), "params": group["params"]})
    return found


def use_own_learning_rates() -> None:
    """Load the optimizer's state into a job with a different --lr or --min-lr, and keep the job's rates.

    megatron-core 0.19 has --override-opt-param-scheduler for this, but it matches parameter groups by their highest and
    lowest rate too, and would keep the rates in the checkpoint.
    """
    from megatron.core.optimizer import distrib_optimizer, optimizer

    whole, distributed = optimizer.MegatronOptimizer, distrib_optimizer.DistributedOptimizer
    reorder, load = whole._filter_and_reorder_param_groups, distributed.load_state_dict

    def reorder_with_own_rates(current: list[dict], stored: list[dict]) -> list[dict]:
        return reorder(current, _with_rates_of(current, stored))

    def load_with_own_rates(self: Any, state: dict) -> None:
        if "optimizer" in state:
            inner = state["optimizer"]
            groups = _with_rates_of(self.optimizer.param_groups, inner["param_groups"])
            state = {**state, "optimizer": {**inner, "param_groups": groups}}
        load(self, state)

    whole._filter_and_reorder_param_groups = staticmethod(reorder_with_own_rates)
    distributed.load_state_dict = load_with_own_rates


def _with_rates_of(current: list[dict], stored: list[dict]) -> list[dict]:
    """The stored groups, each with the rates of the current group of its kind. Groups of a kind with several rates, in
    the job or in the checkpoint, are unchanged."""
    from megatron.core.optimizer.optimizer import param_group_identifier_keys

    rates = ("max_lr", "min_lr")
    kinds = ("default_config", *(key for key in param_group_identifier_keys if key not in rates))

    def rates_by_kind(groups: list[dict]) -> dict[tuple, set[tuple]]:
        found: dict[tuple, set[tuple]] = {}
        for group in groups:
            kind = tuple(map(group.get, kinds))
            found.setdefault(kind, set()).add(tuple(map(group.get, rates)))
        return found

    here, there = rates_by_kind(current), rates_by_kind(stored)
    renamed = []
    for group in stored:
        kind = tuple(map(group.get, kinds))
        if len(here.get(kind, ())) == len(there[kind]) == 1:
            group = {**group, **dict(zip(rates, *here[kind], strict=True))}
        renamed.append(group)
    return renamed
