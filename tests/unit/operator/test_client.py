"""The Python client, against the status API over real HTTP and a Kubernetes API that the test fills."""

import json

import pytest

from dovetail.client import ClientError, Cluster
from dovetail.coordinator.reporting import sample_files
from dovetail.kube import names
from dovetail.manifest.documents import ManifestError
from helpers.fake_jobs_api import JOBS, Api, condition, of_job

MANIFEST = """
apiVersion: dovetail.dev/v1beta1
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
def cluster(api, monkeypatch):
    slept: list[float] = []
    monkeypatch.setattr("dovetail.client.cluster_client.sleep", slept.append)
    url = f"http://127.0.0.1:{api.port}"
    options = {"kubernetes": api.kube.url, "kubernetes_token": "the-api-itself"}
    with Cluster("lab", api=url, api_token="ada-token", **options) as made:
        made.slept = slept  # type: ignore[attr-defined]
        yield made


def test_a_job_is_submitted_watched_stopped_and_deleted(api, cluster, tmp_path):
    (tmp_path / "job.yaml").write_text(MANIFEST)
    assert cluster.submit(tmp_path / "job.yaml") == "fresh"
    # Every release serves this version, and refuses a document of another one at its address.
    assert api.kube.objects[f"{JOBS}/fresh"]["apiVersion"] == "dovetail.dev/v1alpha1"
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
    metadata = of_job("job-train-0")
    metadata["labels"] |= names.labels("job", "uid-1", "train") | {names.GROUP_LABEL: "train"}
    trainer = "job-train-0-0-abcde"
    api.kube.objects[f"{pods}/{trainer}"] = {"metadata": {"name": trainer, "namespace": "lab", **metadata}, "spec": {}}
    api.kube.objects[f"{pods}/{trainer}/log"] = "one\ntwo\n"
    api.kube.objects[f"{pods}/job-coordinator-0-0-abcde/log"] = "three\n"
    api.kube.rights |= {("ada", "get", "pods/log")}
    assert cluster.logs("job") == {"job-coordinator-0-0-abcde": "three\n", trainer: "one\ntwo\n"}


def sample(iteration, prompt, number=0, **fields):
    row = {
        "iteration": iteration,
        "prompt_index": prompt,
        "sample_index": number,
        "prompt": f"What is {prompt}?",
        "response": f"It is {prompt}.",
        "tokens": 10 - prompt,
        "finish_reason": "stop",
        "reward": 0.5 * prompt,
        "kl": 0.25,
        "fields": {"answer": str(prompt)},
    }
    return row | fields


def keep(folder, name, rows):
    (folder / "samples").mkdir(exist_ok=True)
    (folder / "samples" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def sampled(api, cluster, tmp_path, monkeypatch):
    """A run with two iterations and an evaluation, whose samples come in many parts."""
    # A row has about 230 bytes.
    monkeypatch.setattr("dovetail.coordinator.reporting.page.page_documents.SAMPLE_BYTES", 600)
    keep(tmp_path, "iteration-000001", [sample(1, prompt) for prompt in range(5)])
    keep(tmp_path, "iteration-000002", [sample(2, prompt, reward=-prompt, response="äh 😀") for prompt in range(7)])
    answer = {name: value for name, value in sample(0, 3).items() if name not in ("iteration", "reward", "kl")}
    keep(tmp_path, "evaluation-000000", [answer | {"version": 0, "measures": {"reward": 2.0, "exactMatch": 1.0}}])
    api.kube.rights |= {("ada", "get", "pods/log")}
    return cluster


def test_samples_of_the_last_iteration_and_of_named_ones(sampled):
    last = sampled.samples("job")
    assert [(row.iteration, row.prompt_index, row.reward) for row in last] == [(2, i, -float(i)) for i in range(7)]
    assert (last[3].prompt, last[3].response, last[3].tokens) == ("What is 3?", "äh 😀", 7)
    assert (last[3].finish_reason, last[3].kl, last[3].fields) == ("stop", 0.25, {"answer": "3"})
    both = sampled.samples("job", [1, 2])
    assert [(row.iteration, row.prompt_index) for row in both] == [(1, i) for i in range(5)] + [
        (2, i) for i in range(7)
    ]


@pytest.mark.slow
def test_a_part_of_many_samples_costs_no_more_than_its_own_rows(sampled, tmp_path, monkeypatch):
    """The coordinator reads them, while it trains."""
    parsed = []

    class Json:
        dumps = staticmethod(json.dumps)

        @staticmethod
        def loads(text):
            parsed.append(text)
            return json.loads(text)

    monkeypatch.setattr(sample_files, "json", Json)
    keep(tmp_path, "iteration-000003", [sample(3, prompt) for prompt in range(300)])
    assert [row.prompt_index for row in sampled.samples("job", [3])] == list(range(300))
    assert len(parsed) < 2 * 300, "each row, and of each part the first one that has no room"


def test_samples_are_chosen_as_dovetail_samples_chooses_them(sampled):
    assert [row.prompt_index for row in sampled.samples("job", [1], sort="reward", limit=2)] == [4, 3]
    worst = sampled.samples("job", [1], sort="tokens", ascending=True, limit=3)
    assert [row.tokens for row in worst] == [6, 7, 8]
    assert [row.prompt_index for row in sampled.samples("job", [1], grep=r"is [24]\?")] == [2, 4]
    assert [row.prompt_index for row in sampled.samples("job", [1], grep=r"It is", limit=2)] == [0, 1]
    assert sampled.samples("job", grep="It is") == []


def test_answers_of_evaluations(sampled):
    (row,) = sampled.samples("job", evaluation=True)
    assert (row.iteration, row.prompt_index, row.measures) == (0, 3, {"reward": 2.0, "exactMatch": 1.0})
    assert row.reward is None
    with pytest.raises(ClientError, match="the answers of the evaluation before SFT are not kept"):
        sampled.samples("job", [-1], evaluation=True)


def test_samples_that_are_not_there(api, cluster, tmp_path):
    with pytest.raises(ClientError, match="job job keeps no samples: the first ones"):
        cluster.samples("job")
    keep(tmp_path, "iteration-000002", [sample(2, 0)])
    with pytest.raises(ClientError, match=r"answered 403: .*pods/log"):
        cluster.samples("job")
    api.kube.rights |= {("ada", "get", "pods/log")}
    with pytest.raises(ClientError, match="the samples of iteration 9 are not kept"):
        cluster.samples("job", [9])
    with pytest.raises(ClientError, match="keeps no answers of an evaluation"):
        cluster.samples("job", evaluation=True)
    for options, said in (
        ({"sort": "length"}, "sort is 'length'; samples can be sorted by reward, kl, tokens"),
        ({"ascending": True}, "ascending needs sort"),
        ({"grep": "("}, "grep is not a regular expression"),
        ({"limit": 0}, "limit is 0"),
        ({"iterations": [-1]}, "iterations has -1; it must be 0 or more, but with evaluation=True it can be -1"),
        ({"iterations": [-2], "evaluation": True}, "iterations has -2; it must be 0 or more"),
    ):
        with pytest.raises(ValueError, match=said):
            cluster.samples("job", **options)


@pytest.mark.parametrize("state", ["Completed", "Failed", "Running"])
def test_samples_of_a_job_without_a_coordinator(sampled, api, state):
    """Its volume outlives its pods, and the error says where on it they are."""
    status = {"conditions": [condition(state)]}
    if state == "Completed":
        status["artifacts"] = [{"name": "actor", "claim": "my-runs", "path": "first-1/models/actor"}]
    api.kube.objects[f"{JOBS}/job"]["status"] = status
    del api.kube.objects["/api/v1/namespaces/lab/secrets/job-token"]  # as after the end, nothing can be asked
    with pytest.raises(ClientError) as error:
        sampled.samples("job", sort="reward", limit=3)
    said = str(error.value)
    assert error.value.status == 502
    if state == "Running":
        assert "the job has not started yet" in said
    else:
        where = "claim my-runs, folder first-1" if state == "Completed" else "claim job-files, or the one it names"
        assert said.startswith(f"job job is {state}, and only a running coordinator can be asked for samples; they are")
        assert f"({where}). Copy it" in said
        assert "`dovetail samples COPY` shows them" in said


def test_what_fails_is_a_sentence(api, cluster):
    with pytest.raises(ManifestError, match="groups"):
        cluster.submit({"apiVersion": "dovetail.dev/v1beta1", "kind": "RLHFJob", "metadata": {"name": "x"}, "spec": {}})
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
