"""RunState in Megatron's arguments, as checkpoints hold it."""

from argparse import Namespace

from mkd.config.run_state import RunState


def test_names_in_a_checkpoint() -> None:
    """Checkpoints of earlier commits hold these names, and earlier commits read them."""
    args = Namespace(lr=1.0)
    RunState("S/iter_0000003", "aa", unfinished_evaluation=True, balance_factor=0.5).write_to(args)
    assert vars(args) == {
        "lr": 1.0,
        "kd_resume_from": "S/iter_0000003",
        "kd_teacher_fingerprint": "aa",
        "kd_unfinished_evaluation": True,
        "kd_balance_factor": 0.5,
        "kd_data_fingerprints": None,
        "kd_tokenizer_fingerprints": None,
        "kd_prompts_fingerprint": None,
        "kd_tasks_fingerprint": None,
        "kd_base_fingerprint": None,
        "kd_rollout": None,
        "kd_runaway_rollouts": (),
    }


def test_what_is_written_is_read() -> None:
    args, state = Namespace(), RunState("S/iter_0000003", "aa", unfinished_evaluation=True, balance_factor=0.5)
    state.write_to(args)
    assert RunState.read_from(args) == state


def test_written_texts() -> None:
    """Trackers do not record them, and anything else in their place is left out."""
    args, state = Namespace(), RunState(rollout={"key": "a", "written_at": 3, "texts": [[1, 2]]})
    state.write_to(args)
    assert RunState.read_from(args) == state
    state.without_texts().write_to(args)
    assert args.kd_rollout is None and state.rollout is not None
    assert RunState.read_from(Namespace(kd_rollout=[1])) == RunState()


def test_rollouts_that_run_away() -> None:
    args, state = Namespace(), RunState(runaway_rollouts=(3, 6))
    state.write_to(args)
    assert RunState.read_from(args) == state
    for damaged in (3, [3], ("3",), (True,)):
        assert RunState.read_from(Namespace(kd_runaway_rollouts=damaged)) == RunState()


def test_checkpoints_without_a_state() -> None:
    assert RunState.read_from(Namespace(kd_balance_factor=2.0)) == RunState(balance_factor=2.0)
    assert not RunState.read_from(Namespace()).resumes
