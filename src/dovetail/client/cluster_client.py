"""The client of a cluster's two APIs. Both speak HTTP and take a Kubernetes bearer token."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path, PurePosixPath
from time import monotonic, sleep
from types import TracebackType
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from dovetail.manifest.checks.rules import check
from dovetail.manifest.documents import ManifestError, parse, read_yaml
from dovetail.manifest.types import STORED_API_VERSION
from dovetail.protocol.errors import error_text
from dovetail.protocol.files.run_rows import ORDERS, choose
from dovetail.protocol.process.extras import import_error

try:
    import httpx2

    from dovetail.protocol.http.outside_client import outside_client
except ModuleNotFoundError as error:
    raise import_error("dovetail.client", ["client"], error) from error

SECONDS = 60.0
# A job in one of these states does nothing more by itself.
ENDED = ("Completed", "Failed", "Suspended")
NO_COORDINATOR = 502
_MERGE = {"Content-Type": "application/merge-patch+json"}


class ClientError(Exception):
    """A request failed. The message is one sentence. `status`: the HTTP status of the answer. None if there was no
    answer."""

    def __init__(self, sentence: str, status: int | None = None) -> None:
        super().__init__(sentence)
        self.status = status


class _Answer(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="ignore", frozen=True)


class ClusterJob(_Answer):
    """The status API's answer about a job. `state`: Completed, Failed, Suspended, Running, Scheduled, Planned or
    Pending. `iteration`: how many PPO iterations, or steps of the stage, are finished. `iterations`: how many
    there will be. `kl` is in nats per sample."""

    namespace: str
    name: str
    uid: str
    state: str
    stage: str | None = None
    iteration: int | None = None
    iterations: int | None = None
    reward: float | None = None
    kl: float | None = None
    samples_per_second: float | None = None

    @property
    def ended(self) -> bool:
        """Whether the job has stopped: it does nothing more until a user changes it."""
        return self.state in ENDED


class MetricsRow(_Answer):
    """A finished PPO iteration, a step of SFT or of the reward model, or an evaluation."""

    stage: str
    step: int
    metrics: dict[str, float]


class SampleRow(_Answer):
    """A prompt with one response to it. The response is of a PPO iteration, or of the evaluation after it. `tokens`:
    the tokens of the response. `finish_reason`: "stop", or "length" if the response was cut at the limit. `reward`: the
    reward that was trained on. `rewards`: the value of each reward function. `measures`: an evaluation's metrics. `kl`:
    in nats, summed over the response. `weight_version`: the version of the weights that drew the last token, which is
    the number of an iteration. `first_version`: the version that drew the first token. `rollout`: the server that ended
    the response. `fields`: the other fields of the prompt's record."""

    iteration: int
    prompt_index: int
    sample_index: int
    prompt: str
    response: str
    tokens: int
    finish_reason: str | None = None
    reward: float | None = None
    rewards: dict[str, float] = Field(default_factory=dict)
    measures: dict[str, float] = Field(default_factory=dict)
    kl: float | None = None
    weight_version: int | None = None
    first_version: int | None = None
    rollout: str | None = None
    fields: dict[str, Any] = Field(default_factory=dict)


class Cluster:
    """A client for the RLHFJobs of one namespace. All methods raise ClientError.

    `api`: the address of the status API. `api_token`: a token that may read RLHFJobs there. `kubernetes`: the address
    of the Kubernetes API, for example that of `kubectl proxy`, which needs no token. The methods submit, cancel, resume
    and delete need this address. `verify`: a file with the certificates of authorities, or whether certificates are
    checked."""

    def __init__(
        self,
        namespace: str = "default",
        *,
        api: str | None = None,
        api_token: str | None = None,
        kubernetes: str | None = None,
        kubernetes_token: str | None = None,
        verify: bool | str = True,
    ) -> None:
        self.namespace = namespace
        self._api = _Service(
            "the status API", "api", api, f"/api/v1/namespaces/{namespace}/rlhfjobs", api_token, verify
        )
        path = f"/apis/{STORED_API_VERSION}/namespaces/{namespace}/rlhfjobs"
        self._kube = _Service("the Kubernetes API", "kubernetes", kubernetes, path, kubernetes_token, verify)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._api.close()
        self._kube.close()

    # ------------------------------------------------------------ methods that change jobs

    def submit(self, manifest: Path | str | Mapping[str, Any]) -> str:
        """Create a job from a manifest, which is a file or its content. Returns the job's name. The manifest is checked
        here first. Raises ManifestError too."""
        document = dict(manifest) if isinstance(manifest, Mapping) else read_yaml(manifest)
        job = parse(document)
        if errors := check(job.spec):
            raise ManifestError(errors)
        self._kube.ask("POST", "", json={**document, "apiVersion": STORED_API_VERSION})
        return job.metadata.name

    def cancel(self, name: str) -> None:
        """Stop a job and free its GPUs. Its files stay. `resume` continues it from its last checkpoint."""
        self._kube.ask("PATCH", f"/{name}", json={"spec": {"suspend": True}}, headers=_MERGE)

    def resume(self, name: str) -> None:
        """Continue a job that was cancelled."""
        self._kube.ask("PATCH", f"/{name}", json={"spec": {"suspend": False}}, headers=_MERGE)

    def delete(self, name: str) -> None:
        """Delete a job and its pods. The claim with its files stays unless spec.storage.retain is Delete."""
        self._kube.ask("DELETE", f"/{name}")

    # ------------------------------------------------------------ methods that read jobs

    def jobs(self) -> list[ClusterJob]:
        """All jobs of the namespace."""
        listed: list[ClusterJob] = []
        rest: str | None = None
        while True:
            page = self._api.document("", params={"continue": rest} if rest else {})
            listed += [ClusterJob.model_validate(item) for item in page["items"]]
            rest = page.get("continue")
            if not rest:
                return listed

    def job(self, name: str) -> ClusterJob:
        """One job, with its progress."""
        return ClusterJob.model_validate(self._api.document(f"/{name}"))

    def wait(
        self,
        name: str,
        *,
        seconds: float | None = None,
        every: float = 5.0,
        on_change: Callable[[ClusterJob], object] | None = None,
    ) -> ClusterJob:
        """Wait until a job has ended, and return it. Its state is then Completed, Failed or Suspended. `on_change` is
        called with each new state. It is no error if the API does not know a new job for a moment, or does not answer
        for a while. Raises TimeoutError after `seconds`."""
        end, last = None if seconds is None else monotonic() + seconds, None
        while True:
            try:
                job = self.job(name)
            except ClientError as error:
                if error.status in (400, 401, 403):
                    raise
                if error.status == 404 and last is not None:
                    raise ClientError(f"job {name} was deleted", 404) from error
            else:
                if job != last and on_change is not None:
                    on_change(job)
                last = job
                if job.ended:
                    return job
            if end is not None and monotonic() >= end:
                said = "is unknown" if last is None else f"is {last.state}"
                raise TimeoutError(f"job {name} {said} after {seconds:g} s")
            sleep(every)

    def metrics(self, name: str, stage: str | None = None) -> list[MetricsRow]:
        """The rows of a job's history. `stage`: sft, reward, ppo or evaluation. None: all stages."""
        return list(self._rows(name, stage))

    def _rows(self, name: str, stage: str | None) -> Iterator[MetricsRow]:
        after = 0
        while True:
            params: dict[str, Any] = {"after": after} | ({"stage": stage} if stage else {})
            page = self._api.document(f"/{name}/iterations", params=params)
            yield from (MetricsRow.model_validate(item) for item in page["items"])
            if page["next"] <= after:
                return
            after = page["next"]

    def samples(
        self,
        name: str,
        iterations: Sequence[int] = (),
        *,
        evaluation: bool = False,
        sort: str | None = None,
        ascending: bool = False,
        grep: str | None = None,
        limit: int | None = None,
    ) -> list[SampleRow]:
        """Prompts with the model's responses and rewards, with the filters of `dovetail samples`.

        `iterations`: by default the last iteration that is kept. `evaluation`: return the answers of evaluations
        instead. Their iteration is the one after which the weights were evaluated: 0 before PPO, -1 before SFT. `sort`:
        order by reward, kl or tokens, highest first. `ascending`: lowest first. `grep`: only samples whose prompt or
        response matches this regular expression. `limit`: the maximum number of samples.

        The job's coordinator answers, so the job must be running. For a job that has ended, the error says where its
        samples are. The token must have the right to read logs of pods, because logs hold such texts too. Raises
        ValueError for a filter that is wrong."""
        if sort is not None and sort not in ORDERS:
            raise ValueError(f"sort is {sort!r}; samples can be sorted by {', '.join(ORDERS)}")
        if ascending and sort is None:
            raise ValueError("ascending needs sort")
        if limit is not None and limit < 1:
            raise ValueError(f"limit is {limit}; it must be 1 or more")
        if (least := min(iterations, default=0)) < (-1 if evaluation else 0):
            raise ValueError(
                f"iterations has {least}; it must be 0 or more, but with evaluation=True it can be -1 for before SFT"
            )
        try:
            pattern = None if grep is None else re.compile(grep)
        except re.error as error:
            raise ValueError(f"grep is not a regular expression: {error}") from error
        try:
            wanted = list(iterations) or [self._last_samples(name, evaluation)]
            rows = (row for iteration in wanted for row in self._sample_rows(name, iteration, evaluation))
            if sort is None:
                chosen = list(islice((row for row in rows if choose([row], pattern=pattern)), limit))
            else:
                chosen = choose(list(rows), sort, ascending, pattern)[:limit]
        except ClientError as error:
            if error.status != NO_COORDINATOR:
                raise
            raise ClientError(self._where_samples_are(name) or str(error), error.status) from error
        return [SampleRow.model_validate(row) for row in chosen]

    def _where_samples_are(self, name: str) -> str:
        """A sentence that says where the samples of a job are. Empty if the job has not ended."""
        document = self._api.document(f"/{name}")
        job = ClusterJob.model_validate(document)
        if not job.ended:
            return ""
        models = document["status"].get("artifacts") or [{}]
        claim, model = models[0].get("claim"), PurePosixPath(models[0].get("path") or "")
        where = f"claim {claim}, folder {model.parent.parent}" if claim else f"claim {name}-files, or the one it names"
        return (
            f"job {name} is {job.state}, and only a running coordinator can be asked for samples; they are in samples/ "
            f"of its run directory ({where}). Copy it from a pod that mounts the claim, such as "
            "examples/cluster/results.yaml; `dovetail samples COPY` shows them"
        )

    def _last_samples(self, name: str, evaluation: bool) -> int:
        kept = self._api.document(f"/{name}/run/overview")["evaluations" if evaluation else "sample_iterations"]
        if kept:
            return int(kept[-1])
        what = "answers of an evaluation" if evaluation else "samples"
        raise ClientError(
            f"job {name} keeps no {what}: the first ones are not finished yet, or spec.samples.keepMegabytes is 0"
        )

    def _sample_rows(self, name: str, iteration: int, evaluation: bool) -> Iterator[dict[str, Any]]:
        after, more = 0, True
        while more:
            page = self._api.document(
                f"/{name}/run/{'evaluation' if evaluation else 'samples'}/{iteration}/rows/{after}"
            )
            yield from ({**row, "iteration": page["iteration"]} for row in page["rows"])
            after, more = page["next"], page["more"]

    def logs(self, name: str, pod: str | None = None, lines: int = 1000) -> dict[str, str]:
        """The last lines of each pod's log, by the name of the pod. `pod`: only this pod."""
        pods = [pod] if pod else [item["pod"] for item in self._api.document(f"/{name}/logs")["items"]]
        return {each: self._api.ask("GET", f"/{name}/logs/{each}", params={"lines": lines}).text for each in pods}

    def trace(self, name: str, iteration: int) -> bytes:
        """The timeline of an iteration. Perfetto opens it."""
        return self._api.ask("GET", f"/{name}/iterations/{iteration}/trace").content


class _Service:
    """One of the two APIs. `option`: the argument of `Cluster` with its address."""

    def __init__(
        self, what: str, option: str, url: str | None, base: str, token: str | None, verify: bool | str
    ) -> None:
        self._what, self._option, self._url, self._base = what, option, url, base
        self._http = outside_client(url or "", token, SECONDS, verify)

    def close(self) -> None:
        self._http.close()

    def document(self, path: str, **options: Any) -> dict[str, Any]:
        answer = self.ask("GET", path, **options)
        try:
            return dict(answer.json())
        except (ValueError, TypeError) as error:
            raise ClientError(f"what answers at {self._url} is not {self._what}") from error

    def ask(self, method: str, path: str, **options: Any) -> httpx2.Response:
        if self._url is None:
            raise ClientError(f"this needs {self._what}; give Cluster its address with {self._option}=")
        try:
            answer = self._http.request(method, self._base + path, **options)
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise ClientError(f"{self._what} at {self._url} does not answer: {error_text(error)}") from error
        if answer.is_success:
            return answer
        try:
            document = answer.json()
            said = document.get("detail") or document.get("message") or answer.text
        except (ValueError, AttributeError):
            said = answer.text.strip()[:400]
        raise ClientError(f"{self._what} answered {answer.status_code}: {said}", answer.status_code)
