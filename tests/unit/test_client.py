"""The Python client, against the status API over real HTTP and a Kubernetes API that the test fills."""

import pytest
from status_api_fixtures import JOBS, Api, child, condition

from dovetail.client import ClientError, Cluster
from dovetail.manifest.documents import ManifestError

MANIFEST = """
apiVersion: dovetail.dev/v1alpha1
kind: RLHFJob
metadata: {name: fresh}
spec:
  stages: [sft]
  models:
    actor: {source: {scratch: {}}}
    tokenizer: {train: {}}
  data: {demonstrations: [{synthetic: {}}]}
  groups: [{name: train, roles: [trainer]}]
"""


@pytest.fixture
def api(tmp_path, monkeypatch):
    served = Api(tmp_path, monkeypatch)
    yield served
    served.close()


@pytest.fixture
def cluster(api):
    slept: list[float] = []
    url = f"http://127.0.0.1:{api.port}"
    options = {"kubernetes": api.kube.url, "kubernetes_token": "the-api-itself"}
    with Cluster("lab", api=url, api_token="ada-token", sleep=slept.append, **options) as made:
        made.slept = slept  # type: ignore[attr-defined]
        yield made


def test_a_job_is_submitted_watched_stopped_and_deleted(api, cluster, tmp_path):
    (tmp_path / "job.yaml").write_text(MANIFEST)
    assert cluster.submit(tmp_path / "job.yaml") == "fresh"
    assert sorted(job.name for job in cluster.jobs()) == ["fresh", "job"]
    seen = []

    def on_change(job):
        seen.append(job.state)
        status = {"conditions": [condition("Completed" if len(seen) == 2 else "Running")]}
        api.kube.objects[f"{JOBS}/fresh"]["status"] = status

    assert cluster.wait("fresh", every=3.0, on_change=on_change).state == "Completed"
    assert seen == ["Pending", "Running", "Completed"]
    assert cluster.slept == [3.0, 3.0]
    cluster.cancel("fresh")
    assert api.kube.objects[f"{JOBS}/fresh"]["spec"]["suspend"] is True
    assert api.kube.objects[f"{JOBS}/fresh"]["spec"]["stages"] == ["sft"]
    cluster.resume("fresh")
    assert api.kube.objects[f"{JOBS}/fresh"]["spec"]["suspend"] is False
    cluster.delete("fresh")
    assert [job.name for job in cluster.jobs()] == ["job"]


def test_metrics_and_logs(api, cluster):
    for step in (1, 2):
        api.run.add(step, reward=0.5 * step)
    assert [(row.stage, row.step, row.metrics["reward"]) for row in cluster.metrics("job", "ppo")] == [
        ("ppo", 1, 0.5),
        ("ppo", 2, 1.0),
    ]
    assert cluster.metrics("job", "sft") == []
    assert cluster.job("job").iteration == 2
    pods = "/api/v1/namespaces/lab/pods"
    api.kube.objects[f"{pods}/job-trainer"] = child("job-trainer") | {
        "metadata": child("job-trainer")["metadata"] | {"labels": {"dovetail.dev/job": "job"}}
    }
    api.kube.objects[f"{pods}/job-trainer/log"] = "one\ntwo\n"
    api.kube.rights |= {("ada", "get", "pods/log")}
    assert cluster.logs("job") == {"job-trainer": "one\ntwo\n"}


def test_what_fails_is_a_sentence(api, cluster):
    with pytest.raises(ManifestError, match="groups"):
        cluster.submit(
            {"apiVersion": "dovetail.dev/v1alpha1", "kind": "RLHFJob", "metadata": {"name": "x"}, "spec": {}}
        )
    cluster.submit(MANIFEST)
    with pytest.raises(ClientError, match=r"answered 409: .*already exists") as caught:
        cluster.submit(MANIFEST)
    assert caught.value.status == 409
    with pytest.raises(ClientError, match="answered 404"):
        cluster.job("none")
    with pytest.raises(TimeoutError, match="job none is unknown after 0 s"):
        cluster.wait("none", seconds=0)
    with Cluster("lab", api=f"http://127.0.0.1:{api.port}", api_token="wrong") as other:
        with pytest.raises(ClientError, match="answered 401"):
            other.wait("job")
        with pytest.raises(ClientError, match="give Cluster its address with kubernetes="):
            other.cancel("job")
    with pytest.raises(ClientError, match=r"the status API at http://127\.0\.0\.1:9 does not answer"):
        Cluster(api="http://127.0.0.1:9").jobs()
