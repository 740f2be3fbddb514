"""The outcome of a run on all its ranks, and the comparison of two runs in different layouts."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.dist.kd_run import STEPS, kd_run
from tests.support.dist.kd_step import Layout, Models, Part
from tests.support.dist.pool import Pool
from tests.support.tolerance import GRADIENT, STEP_LOSS, UPDATE, assert_close_norm

GetPool = Callable[[int], Pool]


def whole_tensors(parts: list[Part], what: str) -> dict[str, Tensor]:
    """Name -> whole tensor, from the parts of all ranks; copies of one place must agree."""
    whole: dict[str, Tensor] = {}
    for key, shape, place, values in parts:
        full = whole.setdefault(key, torch.full(shape, torch.nan))
        seen = full[place].view(values.shape)
        if not seen.isnan().all():
            assert_close_norm(values, seen, GRADIENT, f"copies of the {what} of {key}")
        full[place] = values.view(full[place].shape)
    for key, value in whole.items():
        assert not value.isnan().any(), f"part of the {what} of {key} is on no rank"
    return whole


def total(reports: list[dict[str, Tensor]]) -> dict[str, tuple[float, float]]:
    """Name -> (sum, count) over all ranks."""
    sums: dict[str, Tensor] = {}
    for report in reports:
        for name, value in report.items():
            sums[name] = sums.get(name, 0) + value
    return {name: (value[0].item(), value[1].item()) for name, value in sums.items()}


@dataclass(frozen=True)
class Outcome:
    """Reports, gradients and changes of one run."""

    reports: list[dict[str, tuple[float, int]]]
    """Name -> (sum, count), of the evaluation and then of each step."""
    grad_norms: list[float]
    gradients: dict[str, Tensor]
    """Unsharded gradients of the first step."""
    changes: dict[str, Tensor]
    """Unsharded change of every parameter over all steps."""
    balance: dict[str, Tensor]
    """Megatron's metrics of mixtures of experts on the first rank: name -> a value for each layer."""

    @classmethod
    def of(
        cls,
        pools: GetPool,
        ranks: int,
        layout: Layout,
        models: Models,
        steps: int = STEPS,
        fault: str | None = None,
        run: Callable[..., dict[str, Any]] = kd_run,
    ) -> "Outcome":
        results: list[dict[str, Any]] = pools(ranks).run(run, layout, models, steps, fault)
        for result in results:
            assert result["grad_norms"] == pytest.approx(results[0]["grad_norms"], rel=STEP_LOSS)
        return cls(
            reports=[total([r["evaluation"] for r in results])]
            + [total([r["steps"][step] for r in results]) for step in range(steps)],
            grad_norms=results[0]["grad_norms"],
            gradients=whole_tensors([part for r in results for part in r["gradients"]], "gradient"),
            changes=whole_tensors([part for r in results for part in r["changes"]], "change"),
            balance=results[0]["balance"],
        )


def assert_same(seen: Outcome, truth: Outcome) -> None:
    """Losses, token counts, gradients, their norms, and what training did to every parameter."""
    for step, (report, expected) in enumerate(zip(seen.reports, truth.reports, strict=True)):
        when = f"step {step}" if step else "evaluation"
        assert report.keys() == expected.keys(), when
        for name, (value, count) in expected.items():
            # Whole numbers are equal; sums of fractional weights depend on the order of additions.
            assert report[name][1] == pytest.approx(count, rel=1e-6), f"tokens of {name}, {when}"
            assert report[name][0] == pytest.approx(value, rel=STEP_LOSS), f"{name}, {when}"
    assert seen.gradients.keys() == truth.gradients.keys()
    for key, value in truth.gradients.items():
        assert value.norm() > 0, f"{key} has no gradient: the comparison would show nothing"
        assert_close_norm(seen.gradients[key], value, GRADIENT, f"gradient of {key}")
    assert seen.grad_norms == pytest.approx(truth.grad_norms, rel=GRADIENT)
    for key, value in truth.changes.items():
        assert_close_norm(seen.changes[key], value, UPDATE, f"change of {key} in {len(truth.reports) - 1} steps")


def assert_equal(seen: Outcome, other: Outcome) -> None:
    """The same to the last bit."""
    assert seen.reports == other.reports
    assert seen.grad_norms == other.grad_norms
    for name in ("gradients", "changes"):
        for key, value in getattr(other, name).items():
            assert torch.equal(getattr(seen, name)[key], value), f"{name} of {key}"
