"""The scripts for Ray clusters, where there is no Ray."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "deploy" / "ray"


@pytest.mark.parametrize("script", ["start_server.py", "example_job.py"])
def test_without_ray_a_script_names_its_extra(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line says what to install, instead of a traceback."""
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SystemExit, match=rf"{script} needs Ray .*pip install '\.\[ray\]'"):
        runpy.run_path(str(SCRIPTS / script), run_name="__main__")
