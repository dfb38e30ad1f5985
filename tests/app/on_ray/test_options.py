"""``ragtag run --on ray``: what is refused before anything is started."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from ragtag.app.launch import LaunchError
from ragtag.app.on_ray import launch, library
from ragtag.app.on_ray.launch import Placement, check_on_ray
from ragtag.core.faults import Faults
from ragtag.core.faultspec import parse_faults
from tests.app.command import error_of, invoke


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text("")
    return path


@pytest.fixture
def as_if_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "load_ray", lambda: None)


def test_options_of_ray_need_ray(script: Path) -> None:
    for option in (("--cpus-per-peer", "2"), ("--gpus-per-peer", "1")):
        result = invoke("run", *option, script)
        assert result.code == 2
        assert error_of(result) == f"error: {option[0]} is for peers on a Ray cluster: add --on ray"


def test_listen_is_not_for_ray(script: Path) -> None:
    result = invoke("run", "--on", "ray", "--listen", "192.0.2.1", script)
    assert result.code == 2
    assert "each listens at its node's address" in error_of(result)


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_where_ray_is_missing_it_says_what_to_install(script: Path, tmp_path: Path) -> None:
    result = invoke("run", "--on", "ray", "-o", tmp_path / "run", script)
    assert result.code == 1
    assert "pip install 'ragtag[ray]'" in error_of(result)
    assert not (tmp_path / "run").exists()
    with pytest.raises(library.NoRay):
        library.load_ray()


@pytest.mark.usefixtures("as_if_installed")
def test_a_script_is_looked_for_inside_the_folder_that_the_nodes_get(script: Path) -> None:
    here = Placement(working_dir=script.parent)
    check_on_ray(2, ["train.py"], here, Faults())
    with pytest.raises(LaunchError, match=r"there is no script .*absent\.py"):
        check_on_ray(2, ["absent.py"], here, Faults())
    with pytest.raises(LaunchError, match="must be a path inside"):
        check_on_ray(2, [str(script)], here, Faults())
    with pytest.raises(LaunchError, match="there is no folder"):
        check_on_ray(2, ["train.py"], Placement(working_dir=script.parent / "absent"), Faults())


@pytest.mark.usefixtures("as_if_installed")
@pytest.mark.parametrize("faults", ["kill=1@3", "freeze=0@1+2"])
def test_faults_of_single_peers_are_refused(script: Path, faults: str) -> None:
    with pytest.raises(LaunchError, match="only those of the whole network"):
        check_on_ray(2, [str(script)], Placement(), parse_faults(faults))


@pytest.mark.usefixtures("as_if_installed")
def test_faults_of_the_network_are_passed_on(script: Path) -> None:
    check_on_ray(2, [str(script)], Placement(), parse_faults("loss=0.1"))


@pytest.mark.parametrize("wrong", [{"cpus_per_peer": -1.0}, {"gpus_per_peer": -1.0}, {"restarts": -1}])
def test_amounts_below_nothing(wrong: dict[str, float]) -> None:
    with pytest.raises(LaunchError, match="0 or more"):
        Placement(**wrong)  # type: ignore[arg-type]
