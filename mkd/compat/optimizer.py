"""Patches of Megatron's optimizers: resuming in fp32, with PyTorch's Adam, and with other learning rates."""

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
