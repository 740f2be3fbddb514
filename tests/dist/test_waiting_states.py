"""Hidden states of a step that wait for the student in host memory: the same losses and gradients to the last bit, and
a number on the device that does not grow with the number of microbatches."""

from dataclasses import replace

import pytest

from mkd.teacher.waiting_states import ON_DEVICE
from tests.support.dist.kd_step import Layout, Models
from tests.support.dist.outcome import GetPool
from tests.support.dist.waiting_states import steps_in_both_memories
from tests.support.slow import slow

SMALL = Models(teacher_layers=2)

# fmt: off
TABLE = {
    "pp2": (2, Layout(pp=2, mbs=2), SMALL, ON_DEVICE),
    "pp2-vp2": (2, Layout(pp=2, vp=2, mbs=2), SMALL, ON_DEVICE + 2),
    "dp2 / tp2": (2, Layout(mbs=1, teacher=Layout(tp=2, sp=True)), SMALL, ON_DEVICE + 1),
}
MORE = {
    "dp2 / pp2": (2, Layout(mbs=1, teacher=Layout(pp=2)), SMALL, 2 * ON_DEVICE),
    "offload": (1, Layout(mbs=2), replace(SMALL, offload=True), ON_DEVICE),
    "pp2, two microbatches a pass": (2, Layout(pp=2, mbs=1), replace(SMALL, teacher_rows=2), ON_DEVICE + 2),
    "pp2, two teachers": (2, Layout(pp=2, mbs=2), replace(SMALL, both=True), 2 * ON_DEVICE + 1),
    "tp2 / cp2, packed": (2, Layout(tp=2, mbs=1, teacher=Layout(cp=2)), replace(SMALL, data="packed"), ON_DEVICE + 1),
}
# fmt: on


@pytest.mark.parametrize("name", [*TABLE, *slow(MORE)])
def test_states_on_the_device(gloo_pool: GetPool, name: str) -> None:
    ranks, layout, models, bound = (TABLE | MORE)[name]
    few, many = (gloo_pool(ranks).run(steps_in_both_memories, layout, models, repeats) for repeats in (3, 6))
    host = [max(result["host"] for result in results) for results in (few, many)]
    assert host[0] == host[1] <= bound
    assert max(result["device"] for result in many) > 2 * bound  # what is counted without the host's memory
