"""mkd/compat/install.py: the order of the patches."""

from types import SimpleNamespace
from typing import Any

import pytest

from mkd.compat import install as module
from mkd.compat.install import install, install_at_start

LAST = ["install_training_hooks", "install_checkpoint_hooks", "install_stopping"]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """(name, positional arguments) of the patches, none of which is applied."""
    seen: list[tuple] = []

    def record(name: str) -> Any:
        return lambda *args: seen.append((name, *args))

    for name in (
        "silence_megatron",
        "use_prebuilt_dataset_helpers",
        "skip_warm_up",
        "read_help_texts_once",
        "balance_experts_over_unequal_ranks",
        "resume_distributed_optimizer",
        "resume_sgd",
        "save_before_the_first_update",
        "allow_finished_jobs",
        "keep_random_state",
        "keep_schedule_position",
        "use_own_learning_rates",
        *LAST,
    ):
        monkeypatch.setattr(module, name, record(name))
    return seen


def test_start(calls: list[tuple]) -> None:
    install_at_start(["--lr", "1"])
    assert calls == [
        ("silence_megatron", ["--lr", "1"]),
        ("use_prebuilt_dataset_helpers",),
        ("skip_warm_up",),
        ("read_help_texts_once",),
        ("balance_experts_over_unequal_ranks",),
    ]


@pytest.mark.parametrize("own_learning_rates", [False, True])
def test_stopping_wraps_the_training_hooks(calls: list[tuple], own_learning_rates: bool) -> None:
    state = SimpleNamespace(unfinished_evaluation=False)
    install("training", "checkpoints", "stop", state, own_learning_rates=own_learning_rates)
    assert calls[-3:] == [(LAST[0], "training"), (LAST[1], "checkpoints"), (LAST[2], "stop", state)]
    rates = ["use_own_learning_rates"] * own_learning_rates
    first = ["resume_distributed_optimizer", "resume_sgd", "save_before_the_first_update"]
    first += ["allow_finished_jobs", "keep_random_state", "keep_schedule_position"]
    assert [call[0] for call in calls[:-3]] == [*first, *rates]
