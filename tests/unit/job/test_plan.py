"""mkd/job/plan.py: lines of the plan."""

from argparse import Namespace
from typing import Any

import pytest

from mkd import cpu
from mkd.config.kd_config import KDConfig
from mkd.job.plan import _delta_nets, implementation_text
from mkd.models.delta_rule import missing_kernel

PRECISE = "eager in float64, which is slower, while T is above 8"


def test_gated_delta_nets_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def model(variant: str | None) -> Namespace:
        return Namespace(experimental_attention_variant=variant, deterministic_mode=False)

    def line(student: str | None, *teachers: str | None) -> str | None:
        job: Any = Namespace(args=model(student), teacher=Namespace(models=[model(teacher) for teacher in teachers]))
        return _delta_nets(job).get("delta nets")

    net = "gated_delta_net"
    assert line(net, net) is None  # on CPU there is no other way
    monkeypatch.setattr(cpu, "is_target", lambda: False)
    monkeypatch.setattr("mkd.models.delta_rule.common.chunk_gated_delta_rule", None)
    assert line(None, None) is None
    reason = missing_kernel(is_trained=True, is_deterministic=False)
    assert line(net, net, net) == f"in PyTorch's operations, slower than kernels; student and teacher: {reason}"
    assert line(None, net) == f"in PyTorch's operations, slower than kernels; teacher: {reason}"
    monkeypatch.setattr("mkd.job.plan.missing_kernel", lambda is_trained, mode: "no gradients" if is_trained else None)
    assert line(net, net) == "in PyTorch's operations, slower than kernels; student: no gradients"


@pytest.mark.parametrize(
    ("options", "implementation", "text"),
    [
        ({"temperature": 8.0}, "triton", "triton"),
        ({"temperature": 9.0}, "triton", PRECISE),
        ({"temperature": 9.0}, "eager", "eager"),
        ({"temperature_schedule": "linear:10:1:100"}, "triton", f"triton, and by {PRECISE}"),
    ],
)
def test_implementation_at_high_temperatures(options: dict[str, float | str], implementation: str, text: str) -> None:
    assert implementation_text(KDConfig(teacher_hf=["T"], ratio=0.5, **options), implementation) == text
