"""mkd/compat/quiet.py: drops the lines that megatron prints about itself, and no others; upstream still prints them."""

import logging
import warnings
from argparse import Namespace
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
from megatron.training import arguments, checkpointing, global_vars, initialize, training
from megatron.training.models import dist_utils
from megatron.training.utils import common_utils

from mkd.compat.quiet import LOGGED, silence_megatron

MODULES = (arguments, checkpointing, common_utils, dist_utils, global_vars, initialize, training)
TIMERS = "megatron.core.timers"


@pytest.fixture(autouse=True)
def as_upstream(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test starts with unpatched megatron, and restores it."""
    loggers = [logging.getLogger(name) for name in (None, TIMERS, *LOGGED)]
    before = [(logger.level, list(logger.filters)) for logger in loggers]
    monkeypatch.setattr(arguments, "_print_args", arguments._print_args)
    monkeypatch.setattr(training, "report_theoretical_memory", training.report_theoretical_memory)
    monkeypatch.setattr("sys.warnoptions", [])
    monkeypatch.setattr(logging.root.manager, "disable", logging.NOTSET)  # a tool that ran in this process sets it
    loggers[0].setLevel(logging.INFO)  # as importing megatron leaves it
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        yield
    for logger, (level, filters) in zip(loggers, before, strict=True):
        logger.setLevel(level)
        logger.filters[:] = filters
    for module in MODULES:
        vars(module).pop("print", None)


def print_samples() -> None:
    """Print some of megatron's lines of each kind."""
    arguments._print_args("arguments", Namespace(num_layers=2))
    common_utils.print_rank_0("> setting random seeds to 1234 ...")
    common_utils.print_rank_0("[after megatron is initialized] datetime: 2026-01-01 00:00:00.000000 ")
    global_vars._GLOBAL_ONE_LOGGER = None
    global_vars._set_one_logger(
        Namespace(enable_one_logger=True, rank=0, world_size=1, one_logger_async=False, one_logger_project="")
    )


def test_lines_about_megatron_are_dropped(capsys):
    print_samples()
    out = capsys.readouterr().out
    for words in ("num_layers ....", "random seeds", "datetime", "one_logger package"):
        assert words in out  # else upstream no longer prints it, and the line in quiet.py can be removed
    silence_megatron([], {})
    print_samples()
    assert capsys.readouterr().out == ""


def test_a_first_start_has_no_warning_about_random_weights(capsys, tmp_path):
    """The plan names the weights' source; a --load without a checkpoint is refused unless the job saves there too."""
    args = Namespace(ckpt_step=None, exit_on_missing_checkpoint=False, non_persistent_ckpt_type=None)
    args.non_persistent_global_ckpt_dir = None

    def load() -> None:
        checkpointing._load_base_checkpoint(str(tmp_path), args)

    load()
    assert "will not load any checkpoints and will start from random" in capsys.readouterr().out
    silence_megatron([], {})
    load()
    assert capsys.readouterr().out == ""


def test_lines_about_the_run_stay(capsys):
    silence_megatron([], {})
    lines = (
        "WARNING: Setting args.overlap_p2p_comm and args.align_param_gather to False",
        "[exiting program after receiving SIGTERM.] datetime: 2026-01-01 00:00:00.000000 ",
        "  successfully saved checkpoint from iteration       2 to out [ t 1/2, gtp_remat 1/1, p 1/1 ]",
    )
    for line in lines:
        common_utils.print_rank_0(line)
        arguments.print(line, flush=True)
    assert capsys.readouterr().out.splitlines() == [line for line in lines for _ in range(2)]


def test_loggers(caplog):
    silence_megatron([], {})
    assert not logging.getLogger("megatron.core.optimizer").isEnabledFor(logging.INFO)
    for name in LOGGED:
        logging.getLogger(name).warning("unexpected result")
    logging.getLogger("megatron.core.models.gpt.gpt_model").warning("GPTModel IS DEPRECATED. It is")
    logging.getLogger("megatron.core.rerun_state_machine").warning("Setting RerunStateMachine mode %s", "DISABLED")
    assert [record.getMessage() for record in caplog.records] == ["unexpected result"] * len(LOGGED)


@pytest.mark.parametrize("name", LOGGED)
def test_upstream_still_logs_it(name):
    module = import_module(name)
    assert module.logger.name == name
    text = Path(module.__file__).read_text()
    for beginning in LOGGED[name].split("|"):
        assert beginning in text


def test_warnings_about_megatron_are_dropped():
    silence_megatron([], {})
    with warnings.catch_warnings(record=True) as seen:
        for module in ("megatron.core.optimizer", "torch.nn.modules.module", "mkd.job.job", "torchvision"):
            for category in (DeprecationWarning, FutureWarning, UserWarning):
                warnings.warn_explicit("something", category, "file.py", 1, module=module)
    kept = [(warning.category, warning.filename) for warning in seen]
    assert [category for category, _ in kept] == [
        *(UserWarning, UserWarning),  # of megatron and torch: they may be about the run
        *(DeprecationWarning, FutureWarning, UserWarning) * 2,
    ]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("models/backends.py", "Apex is not installed. Falling back to Torch Norm"),
        ("models/gpt/gpt_layer_specs.py", "Apex is not installed. Falling back to Torch Norm"),
        ("extensions/transformer_engine_spec_provider.py", "Only transformer-engine>=1.7.0 supports MoE experts, "),
    ],
)
def test_warnings_about_absent_packages_are_dropped(name: str, message: str) -> None:
    """Every rank on a GPU would print them when it imports megatron."""
    text = (Path(arguments.__file__).parents[1] / "core" / name).read_text()
    assert message in text  # else upstream no longer warns, and the line in quiet.py can be removed
    silence_megatron([], {})
    with warnings.catch_warnings(record=True) as seen:
        warnings.warn_explicit(f"{message}but your version is 0.0.0.", UserWarning, name, 1, module="megatron.core")
        warnings.warn_explicit("invalid escape sequence", SyntaxWarning, name, 1, module="/lib/megatron/core/a")
        warnings.warn_explicit("invalid escape sequence", SyntaxWarning, name, 1, module="/lib/mine/a")
    assert [warning.category for warning in seen] == [SyntaxWarning]


def test_requested_lines_are_printed(capsys):
    root = logging.getLogger()
    silence_megatron(["--kd-verbose"], {})
    print_samples()
    assert "num_layers" in capsys.readouterr().out
    assert root.level == logging.INFO
    silence_megatron(["--logging-level=20"], {})
    assert root.level == logging.INFO
    silence_megatron([], {"MEGATRON_LOGGING_LEVEL": "20"})
    assert root.level == logging.INFO
    silence_megatron(["--timing-log-level", "1", "--log-memory-interval", "5"], {})
    assert root.level == logging.WARNING
    assert logging.getLogger(TIMERS).isEnabledFor(logging.INFO)
    memory = "[Rank 0] (after 5 iterations) memory (MB) | allocated: 0.00"
    common_utils.print_rank_0(memory)
    silence_megatron([], {})
    common_utils.print_rank_0(memory)
    assert capsys.readouterr().out.splitlines() == [memory]
