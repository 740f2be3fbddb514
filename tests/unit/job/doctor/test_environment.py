"""The report on an environment, with parts that are there, missing, or not what they seem."""

import subprocess
from importlib import util
from pathlib import Path
from types import SimpleNamespace

import pytest

from mkd.cli import doctor
from mkd.job.doctor import environment
from mkd.job.doctor.environment import Part, apex, cards, has_wrong_apex, inspect, lowest_capability, transformer_engine


def pretend(monkeypatch: pytest.MonkeyPatch, **versions: str | None) -> None:
    """Installed distributions and modules of these names; None for one that is not there."""
    names = {name.replace("_", "-"): version for name, version in versions.items()}
    real_version, real_spec = environment.version, util.find_spec
    monkeypatch.setattr(environment, "version", lambda name: names[name] if name in names else real_version(name))
    modules = {environment.REQUIRED.get(name, name.replace("-", "_")): version for name, version in names.items()}
    monkeypatch.setattr(
        environment, "find_spec", lambda name: modules[name] and object() if name in modules else real_spec(name)
    )


def part(name: str) -> Part:
    return next(part for part in inspect() if part.name.startswith(name))


def test_all_that_is_needed_is_here(monkeypatch, capsys):
    pretend(monkeypatch, transformer_engine=None)
    assert not any(part.needed for part in inspect())
    assert part("torch").found and part("torch").trouble is None
    assert doctor.main([]) == 0
    output = capsys.readouterr().out
    assert output.splitlines()[-1] == "all that training needs is here; what is missing is optional"
    assert "host memory" in output and "-> pip install 'transformer-engine[pytorch]', or" in output


def test_what_is_needed_and_missing(monkeypatch, capsys):
    pretend(monkeypatch, megatron_core="0.18.1", transformers=None, transformer_engine=None)
    assert part("megatron-core").needed and "megatron-core==0.19.*" in part("megatron-core").remedy
    assert part("transformers").found is None and part("transformers").needed
    monkeypatch.setattr(environment.sys, "version_info", (3, 11, 2))
    assert part("Python").needed
    assert doctor.main([]) == 1
    assert "nothing can be trained here: Python, megatron-core, transformers" in capsys.readouterr().out


@pytest.mark.parametrize("name", environment.OPTIONAL)
def test_what_may_be_missing(monkeypatch, name):
    pretend(monkeypatch, transformer_engine=None, **{name.replace("-", "_"): None})
    found = part(name)
    assert found.found is None and not found.needed and found.trouble and "pip install" in found.remedy


def test_transformer_engine_that_cannot_be_imported(monkeypatch):
    pretend(monkeypatch, transformer_engine="2.9")
    failed = SimpleNamespace(returncode=1, stderr="Traceback\nImportError: libcudnn.so.9: no such file")
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: failed)
    found = transformer_engine()
    assert found.found == "2.9" and "libcudnn.so.9" in found.trouble and "reinstall it" in found.remedy
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: SimpleNamespace(returncode=0))
    assert transformer_engine().trouble is None


def test_both_packages_named_apex(monkeypatch, tmp_path):
    folder = tmp_path / "apex"
    folder.mkdir()
    spec = util.spec_from_file_location("apex", folder / "__init__.py", submodule_search_locations=[str(folder)])
    others = {"fused_weight_gradient_mlp_cuda": None, "apex": spec}
    monkeypatch.setattr(environment, "find_spec", others.get)
    assert has_wrong_apex()
    assert "PyPI" in apex().trouble and apex().remedy.startswith("pip uninstall apex")
    (folder / "multi_tensor_apply").mkdir()
    assert not has_wrong_apex() and "--cuda_ext" in apex().remedy
    others["fused_weight_gradient_mlp_cuda"] = spec
    assert apex().trouble is None
    others["apex"] = None
    assert not has_wrong_apex() and apex().found is None


def test_cards(monkeypatch):
    answer = SimpleNamespace(returncode=0, stdout="NVIDIA H100 80GB HBM3, 81559, 570.1\n" * 2)
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: answer)
    assert [(card.name, round(card.gib, 1)) for card in cards()] == [("NVIDIA H100 80GB HBM3", 79.6)] * 2
    monkeypatch.setattr(environment, "transformer_engine", lambda: Part("transformer-engine", "2.9"))
    assert "2 x NVIDIA H100 80GB HBM3, 79.6 GiB" in part("GPU").found
    assert lowest_capability(cards()) is None and lowest_capability([]) is None
    answer.stdout = "NVIDIA H100, 81559, 570.1, 9.0\nNVIDIA A100, 81559, 570.1, 8.0\nNVIDIA B200, 9, 570.1, 10.0\n"
    assert lowest_capability(cards()) == (8, 0)
    answer.stdout += "NVIDIA Z1, 81559, 570.1, [N/A]\n"
    assert len(cards()) == 4 and lowest_capability(cards()) is None
    answer.returncode = 9
    assert cards() == []
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: Path("/no/such/file").read_text())
    assert cards() == []
