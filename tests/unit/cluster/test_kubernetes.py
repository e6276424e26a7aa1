"""The jobs for Kubernetes, against the published models of their resources."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.cli import main
from harness.resilience.options import read_options

SCRIPT = ("scripts/train.py", "--deepspeed_config", "zero3", "--output_dir", "/data/run")
OF_8, OF_6 = (("--volume", "claim", "--gpus", ranks) for ranks in ("8", "6"))
KINDS = {
    "TrainingRuntime": "TrainerV1alpha1TrainingRuntime",
    "TrainJob": "TrainerV1alpha1TrainJob",
    "JobSet": "JobsetV1alpha2JobSet",
}


def written(*flags: str, folder: Path, script: tuple[str, ...] = SCRIPT) -> list[dict[str, Any]]:
    """Return the documents of the file."""
    path = folder / "job.yaml"
    volume = () if "--volume" in flags else ("--volume", "claim")
    assert main(["cluster", "kubernetes", *volume, *flags, "--output", str(path), "--", *script]) == 0
    return list(yaml.safe_load_all(path.read_text()))


def lost(document: Any, read: Any, where: str = "") -> list[str]:
    """Name the fields of a document that its published model does not know: models drop those silently."""
    if isinstance(document, dict):
        known = read if isinstance(read, dict) else {}
        return [
            name
            for key, value in document.items()
            for name in ([f"{where}/{key}"] if key not in known else lost(value, known[key], f"{where}/{key}"))
        ]
    if isinstance(document, list):
        return [name for one, other in zip(document, read, strict=True) for name in lost(one, other, where)]
    return [] if document == read else [where]


@pytest.mark.parametrize("resource", ["TrainJob", "JobSet"])
@pytest.mark.parametrize(
    "flags",
    [
        ("--gpus", "8", "--nodes", "4", "--min_nodes", "2", "--volume", "claim", "--namespace", "team"),
        ("--ranks", "2", "--cpus", "8", "--memory", "32Gi", "--shared_memory", "1"),
    ],
)
def test_each_document_is_what_its_published_model_says(resource: str, flags: tuple[str, ...], tmp_path: Path) -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models")  # here: all workers collect, one of them runs this
    documents = written("--resource", resource, *flags, folder=tmp_path)
    assert [each["kind"] for each in documents] == (
        ["TrainingRuntime", "TrainJob"] if resource == "TrainJob" else ["JobSet"]
    )
    for document in documents:
        model = getattr(models, KINDS[document["kind"]])
        read = model.from_dict(document)
        assert read is not None and lost(document, read.to_dict()) == []


def pod_of(document: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the job and the pod of a TrainingRuntime or a JobSet."""
    spec = document["spec"]
    (job,) = (spec.get("template", {}).get("spec") or spec)["replicatedJobs"]
    return job["template"]["spec"], job["template"]["spec"]["template"]["spec"]


def action_on(job: dict[str, Any], code: int, *, is_disrupted: bool = False) -> str | None:
    """What Kubernetes does with a pod that has ended: the first rule that fits counts; None counts as a failure."""
    for rule in job["podFailurePolicy"]["rules"]:
        on_code, on_conditions = rule.get("onExitCodes"), rule.get("onPodConditions", [])
        assert on_code is None or 0 not in on_code["values"] or on_code["operator"] == "NotIn"
        if is_disrupted and {"type": "DisruptionTarget", "status": "True"} in on_conditions:
            return str(rule["action"])
        if on_code is not None and (code in on_code["values"]) == (on_code["operator"] == "In"):
            return str(rule["action"])
    return None


@pytest.mark.parametrize("resource", ["TrainJob", "JobSet"])
def test_exit_codes_time_to_save_shared_memory_and_volume(resource: str, tmp_path: Path) -> None:
    flags = ("--resource", resource, "--gpus", "8", "--nodes", "4", "--volume", "claim", "--save_seconds", "90")
    job, pod = pod_of(written(*flags, folder=tmp_path)[0])
    assert job["completionMode"] == "Indexed" and pod["restartPolicy"] == "Never"  # a failure policy needs it
    assert {action_on(job, code) for code in (1, 2, 3, 126, 127)} == {"FailJob"}  # the launch has given up
    assert {action_on(job, 128 + number) for number in (1, 2, 10, 15)} == {"Ignore"}  # it has saved
    assert action_on(job, 137) is action_on(job, 139) is None  # counted: out of memory, a node that was restarted
    assert {action_on(job, code, is_disrupted=True) for code in (1, 137, 143)} == {"Ignore"}
    assert pod["terminationGracePeriodSeconds"] == 240  # twice a save and a minute
    (container,) = pod["containers"]
    mounts = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
    volumes = {each["name"]: each for each in pod["volumes"]}
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    assert volumes[mounts["/data"]]["persistentVolumeClaim"]["claimName"] == "claim"


def environment_of(documents: list[dict[str, Any]]) -> tuple[list[str], dict[str, str]]:
    """Return a pod's command, and its variables as the controllers set them, of pod 1."""
    last = documents[-1]
    if last["kind"] == "TrainJob":
        trainer = last["spec"]["trainer"]
        kubeflow = {
            "PET_NNODES": str(trainer["numNodes"]),
            "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
            "PET_NODE_RANK": "1",
            "PET_MASTER_ADDR": f"{last['metadata']['name']}-node-0-0.{last['metadata']['name']}",
            "PET_MASTER_PORT": "29400",
        }
        return trainer["command"], kubeflow
    (container,) = pod_of(last)[1]["containers"]
    return container["command"], {each["name"]: each["value"] for each in container["env"] if "value" in each}


@pytest.mark.parametrize("resource", ["TrainJob", "JobSet"])
def test_a_pod_finds_the_others_by_what_its_controller_tells_it(
    resource: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command, variables = environment_of(written("--resource", resource, "--gpus", "8", "--nodes", "4", folder=tmp_path))
    for name, value in {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "JOB_COMPLETION_INDEX": "1", **variables}.items():
        monkeypatch.setenv(name, value)
    assert command[:2] == ["ds-harness", "launch"]
    options = read_options(command[2:])
    assert options.rdzv_endpoint == "ds-harness-node-0-0.ds-harness:29400"
    assert (options.nodes, options.node_rank, options.num_accelerators) == ((4, 4), 1, 8)
    assert options.script == (*SCRIPT, "--resume_from_checkpoint", "auto") and options.max_restarts == 20


def test_the_fewest_hosts_are_those_of_the_launch(tmp_path: Path) -> None:
    *_, job = written("--gpus", "8", "--nodes", "4", "--min_nodes", "2", folder=tmp_path)
    command = job["spec"]["trainer"]["command"]
    assert command[command.index("--nnodes") + 1] == "2:4"


@pytest.mark.parametrize(
    ("flags", "script", "said"),
    [
        (("--gpus", "8"), (), "the training script is missing: add -- SCRIPT ARGUMENTS"),
        ((), SCRIPT, "give --gpus, or --ranks for hosts without GPUs"),
        (("--gpus", "8", "--min_nodes", "2"), SCRIPT, "--min_nodes 2 is more than --nodes 1"),
        (("--gpus", "8", "--name", "My job"), SCRIPT, "--name My job: must be lower-case letters, digits and dashes"),
        (("--gpus", "8", "--namespace", "a-"), SCRIPT, "--namespace a-: must be lower-case letters"),
        (
            ("--gpus", "8", "--volume", "c", "--mount", "/runs"),
            SCRIPT,
            "must lie in the volume, for instance /runs/run",
        ),
        (("--gpus", "8"), (*SCRIPT, "--resume_from_checkpoint=auto"), "leave out --resume_from_checkpoint"),
        (("--gpus", "8"), SCRIPT, "--output_dir /data/run: lies in the pod and is lost with it: give --volume CLAIM"),
        ((*OF_8, "--memory", "900GB"), SCRIPT, "--memory: must be a size in Kubernetes' units, as 900Gi or 900G"),
        ((*OF_8, "--cpus", "0"), SCRIPT, "--cpus: must be a number of processors"),
        ((*OF_8, "--mount", "data"), SCRIPT, "--mount: must be a folder's absolute path"),
        (OF_8, (SCRIPT[0], "--output_dir", "/data/../run"), "--output_dir /data/../run: must lie in the volume"),
        (OF_8, SCRIPT[:1], "--output_dir runs/default: must lie in the volume"),
        (OF_8, (*SCRIPT, "--lerning_rate", "1"), "unknown flag --lerning_rate: did you mean --learning_rate?"),
        (OF_8, (*SCRIPT, "--deepspeed_config", "nosuch"), "DS001 no such file or preset"),
        (OF_8, (*SCRIPT, "--model_name_or_path", "nosuch"), "nosuch"),
        (
            OF_6,
            (*SCRIPT, "--deepspeed_config", "pipeline_3d"),
            "DS311 6 ranks cannot be divided into copies of 2 pipeline",
        ),
        ((*OF_8, "--output", "/no/job"), SCRIPT, "/no/job: cannot be written: No such file or directory"),
    ],
)
def test_what_cannot_be_is_one_line(
    flags: tuple[str, ...], script: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["cluster", "kubernetes", *flags, *(["--", *script] if script else [])]
    try:
        assert main(words) == 1
    except SystemExit as end:
        assert end.code == 2
    error = capsys.readouterr().err
    assert said in error and len(error.splitlines()) == 1


def test_what_only_the_pods_see_is_not_looked_for_here(tmp_path: Path) -> None:
    others = ("--train_file", "/data/rows.jsonl", "--model_name_or_path", "/data/model")
    written("--gpus", "6", folder=tmp_path, script=(*SCRIPT, "--deepspeed_config", "/data/own.json", *others))
    written(
        "--gpus", "8", folder=tmp_path, script=("their/script.py", "--lerning_rate", "1", "--output_dir", "/data/a")
    )


def test_the_time_of_a_save_is_the_one_that_an_earlier_run_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.json").write_text('{"longest_save_s": 200.0}')
    script = ("scripts/train.py", "--output_dir", str(tmp_path))
    assert main(["cluster", "slurm", "--gpus", "8", "--", *script]) == 0
    assert "#SBATCH --signal=B:USR1@460\n" in capsys.readouterr().out
