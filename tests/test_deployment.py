"""What docs/deployment.md gives people to copy can be read by the tools that it is for."""

import subprocess
from pathlib import Path
from typing import Any

import yaml

from staleflow.config import load

ROOT = Path(__file__).parents[1]


def test_the_slurm_script_is_a_shell_script() -> None:
    subprocess.run(["bash", "-n", ROOT / "examples" / "slurm.sh"], check=True)


def test_the_kubernetes_example_is_a_ray_job_whose_pods_share_a_disk_and_have_shared_memory() -> None:
    job: dict[str, Any] = yaml.safe_load((ROOT / "examples" / "kuberay.yaml").read_text())
    cluster = job["spec"]["rayClusterSpec"]
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert cluster["authOptions"] == {"mode": "token"}
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        mounts = {each["mountPath"]: each["name"] for each in pod["containers"][0]["volumeMounts"]}
        assert {"/shared", "/dev/shm"} == mounts.keys()
        assert set(mounts.values()) == {each["name"] for each in pod["volumes"]}


def test_settings_of_the_examples_exist() -> None:
    """Those that are given on command lines, there and on the page."""
    job = yaml.safe_load((ROOT / "examples" / "kuberay.yaml").read_text())["spec"]["entrypoint"]
    text = (ROOT / "examples" / "slurm.sh").read_text() + (ROOT / "docs" / "deployment.md").read_text()
    lines = [job, *(line for line in text.splitlines() if "staleflow train" in line)]
    given = [word.strip("`|") for line in lines for word in line.partition("staleflow train")[2].split()]
    settings = [word for word in given if "=" in word and not word.startswith("-")]
    assert len(settings) >= 8
    for setting in settings:
        load("laptop", [setting])
