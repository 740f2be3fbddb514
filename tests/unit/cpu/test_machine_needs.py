"""Flags that need a GPU, Transformer Engine, a package or a file are refused before anything is loaded."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from mkd import cpu
from mkd.config.flags import default_arguments
from mkd.cpu import machine_needs
from mkd.cpu.machine_needs import check_machine_needs
from mkd.errors import MkdConfigError, MkdNodeError, MkdPackageError


def arguments(**changes: Any) -> Namespace:
    return Namespace(**{**vars(default_arguments()), **changes})


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "is_target", lambda: True)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU, with no package of `NEED_PACKAGE`."""
    monkeypatch.setattr(cpu, "is_target", lambda: False)
    monkeypatch.setattr(machine_needs, "find_spec", lambda name: None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"profile": True}, "--profile needs a GPU"),
        ({"record_memory_history": True}, "--record-memory-history needs a GPU"),
        ({"log_straggler": True}, "--log-straggler needs a GPU"),
        ({"gpu_sniff_test_interval": 10}, "--gpu-sniff-test-interval needs a GPU"),
        ({"optimizer_cuda_graph": True}, "--optimizer-cuda-graph needs a GPU"),
        ({"fp32_residual_connection": True}, "--fp32-residual-connection needs the layers of Transformer Engine"),
        ({"use_precision_aware_optimizer": True}, "--use-precision-aware-optimizer needs a GPU"),
        ({"save_dgrads_interval": 1}, "--save-dgrads-interval needs the layers of Transformer Engine"),
    ],
)
def test_flags_that_need_a_gpu(changes: dict[str, Any], message: str, on_cpu: None) -> None:
    with pytest.raises(MkdConfigError, match=message):
        check_machine_needs(arguments(**changes))


def test_what_a_cpu_can_do(on_cpu: None) -> None:
    check_machine_needs(arguments(profile=True, use_pytorch_profiler=True))


def test_layers_of_megatron_itself_lack_them_on_a_gpu_too(on_gpu: None) -> None:
    check_machine_needs(arguments(profile=True, fp32_residual_connection=True))
    with pytest.raises(MkdConfigError, match="--fp32-residual-connection needs the layers of Transformer Engine"):
        check_machine_needs(arguments(fp32_residual_connection=True, transformer_impl="local"))


def test_an_optimizer_of_transformer_engine_works_with_layers_of_megatron_itself(
    on_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"use_precision_aware_optimizer": True, "transformer_impl": "local"}
    check_machine_needs(arguments(**given, optimizer_cpu_offload=True))
    with pytest.raises(MkdPackageError, match="--use-precision-aware-optimizer needs the package transformer-engine"):
        check_machine_needs(arguments(**given))
    monkeypatch.setattr(machine_needs, "find_spec", lambda name: object())
    check_machine_needs(arguments(**given))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"log_device_memory_used": True}, "--log-device-memory-used needs the package nvidia-ml-py"),
        ({"enable_ft_package": True}, "--enable-ft-package needs the package nvidia-resiliency-ext"),
    ],
)
def test_packages_that_are_missing(changes: dict[str, Any], message: str, on_gpu: None) -> None:
    with pytest.raises(MkdPackageError, match=message):
        check_machine_needs(arguments(**changes))


def test_files_that_are_missing(tmp_path: Path, on_gpu: None) -> None:
    (tmp_path / "recipe.yaml").write_text("{}")
    check_machine_needs(arguments(te_precision_config_file=str(tmp_path / "recipe.yaml")))
    with pytest.raises(MkdNodeError, match=r"--te-precision-config-file .*absent\.yaml is not a file"):
        check_machine_needs(arguments(te_precision_config_file=str(tmp_path / "absent.yaml")))
