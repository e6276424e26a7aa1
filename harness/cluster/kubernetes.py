"""Describe a run as a TrainJob of Kubeflow Trainer v2, with a runtime of its own, or as a JobSet.

Every pod runs one `ds-harness launch`, which finds the others through the first pod. Its exit code decides what
Kubernetes does with a pod that has ended: see SAVED and BY_SIGNAL. 137 without a disruption (out of memory, a host that
was restarted) counts as a failure of the pod, which is started again, BACKOFF times.
"""

from __future__ import annotations

from typing import TypeAlias

from harness.cluster.job import Job
from harness.config.values.json_object import JsonObject
from harness.topology.env import SECRET

Document: TypeAlias = JsonObject
PORT = 29400
SAVED = (129, 130, 138, 143)  # 128 + signal: the ranks have saved; a new pod goes on, and no failure is counted
BY_SIGNAL = tuple(range(129, 160))  # with any other code the launch has given up: a new pod would fail, too
NODE = "node"  # Kubeflow's runtimes require this name for the replicated job that trains, and for its container
BACKOFF = 100  # pods that may be lost (out of memory, a dead host) before the job fails


def train_job(job: Job) -> list[Document]:
    """Return a TrainingRuntime and a TrainJob that uses it.

    The runtime is Kubeflow's `torch-distributed` with a failure policy, for which a TrainJob has no field.
    """
    runtime = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": {
            **_metadata(job, f"{job.name}-torch-distributed"),
            "labels": {"trainer.kubeflow.org/framework": "torch"},
        },
        "spec": {
            "mlPolicy": {"numNodes": job.nodes, "torch": {}},
            "template": {
                "spec": {
                    "replicatedJobs": [
                        {
                            "name": NODE,
                            "template": {
                                "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
                                "spec": _job_spec(job, with_size=False),
                            },
                        }
                    ]
                }
            },
        },
    }
    trainer = {
        "image": job.image,
        "command": _command(job),
        "numNodes": job.nodes,
        "numProcPerNode": job.ranks,
        "resourcesPerNode": _resources(job),
    }
    wanted = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _metadata(job, job.name),
        "spec": {
            "runtimeRef": {
                "apiGroup": "trainer.kubeflow.org",
                "kind": "TrainingRuntime",
                "name": f"{job.name}-torch-distributed",
            },
            "trainer": trainer,
        },
    }
    return [runtime, wanted]


def job_set(job: Job) -> Document:
    """Return a JobSet: one indexed job with a pod for each host. Pods find each other by DNS names."""
    spec = _job_spec(job, with_size=True)
    (container,) = spec["template"]["spec"]["containers"]
    container |= {
        "command": _command(job),
        "env": [
            *container["env"],
            {"name": "NNODES", "value": str(job.nodes)},
            {"name": "NPROC_PER_NODE", "value": str(job.ranks)},
            {"name": "MASTER_ADDR", "value": f"{job.name}-{NODE}-0-0.{job.name}"},
            {"name": "MASTER_PORT", "value": str(PORT)},
        ],
        "resources": _resources(job),
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _metadata(job, job.name),
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": job.name, "publishNotReadyAddresses": True},
            # ds-harness launch itself restarts the ranks; once it has given up, the whole job fails
            "failurePolicy": {"maxRestarts": 0},
            "replicatedJobs": [{"name": NODE, "replicas": 1, "template": {"spec": spec}}],
        },
    }


def _job_spec(job: Job, *, with_size: bool) -> Document:
    size = {"parallelism": job.nodes, "completions": job.nodes} if with_size else {}
    rules: list[Document] = [
        {
            "action": "Ignore",  # evicted, preempted, drained: not the run's fault
            "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
        }
    ]
    for action, operator, codes in (("Ignore", "In", SAVED), ("FailJob", "NotIn", BY_SIGNAL)):
        of_code = {"containerName": NODE, "operator": operator, "values": list(codes)}
        rules.append({"action": action, "onExitCodes": of_code})
    volumes: list[Document] = [
        {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": f"{job.shared_gib}Gi"}}
    ]
    mounts = [{"name": "shared-memory", "mountPath": "/dev/shm"}]
    if job.volume:
        volumes.append({"name": "output", "persistentVolumeClaim": {"claimName": job.volume}})
        mounts.append({"name": "output", "mountPath": job.mount})
    return {
        **size,
        "completionMode": "Indexed",
        "backoffLimit": BACKOFF,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {"rules": rules},
        "template": {
            "spec": {
                "restartPolicy": "Never",
                "terminationGracePeriodSeconds": job.grace_s,
                "containers": [{"name": NODE, "image": job.image, "env": [_secret(job)], "volumeMounts": mounts}],
                "volumes": volumes,
            }
        },
    }


def _secret(job: Job) -> Document:
    """Return the variable by which the pods of this run know each other, if the user has made a secret for it."""
    source = {"name": f"{job.name}-secret", "key": "secret", "optional": True}
    return {"name": SECRET, "valueFrom": {"secretKeyRef": source}}


def _command(job: Job) -> list[str]:
    elastic = ["--nnodes", f"{job.least}:{job.nodes}"] if job.least < job.nodes else []
    return ["ds-harness", "launch", "--max_restarts", str(job.restarts), *elastic, *job.words]


def _resources(job: Job) -> Document:
    wanted: Document = {}
    if job.cpus:
        wanted["cpu"] = job.cpus
    if job.memory:
        wanted["memory"] = job.memory
    if job.gpus:
        wanted["nvidia.com/gpu"] = str(job.ranks)
    return {"requests": wanted, "limits": wanted.copy()} if wanted else {}


def _metadata(job: Job, name: str) -> Document:
    return {"name": name, **({"namespace": job.namespace} if job.namespace else {})}
