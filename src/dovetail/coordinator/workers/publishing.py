"""Publishes one weight version to a set of receivers. The trainers offer it, and the receivers take it
(docs/architecture.md, "Weights").

A vLLM server is probed: it is asked for the log-probabilities of a few tokens, which are compared with the trainers'
for the same version. Until it has passed, it answers no other requests."""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from dovetail.coordinator.workers.offers import CALL_SECONDS, GRACE_SECONDS, ReceiverError, post, push_offer
from dovetail.coordinator.workers.trainer_group import TrainerError, TrainerGroup
from dovetail.protocol.messages import CALLED_OFF, PROBE_HEADER, CommandResult, Offer, Probe, Publish, Receiver, SendOn
from dovetail.protocol.process.endings import cancel

PROBE_SECONDS = 60.0
# This header of vLLM selects the data-parallel engine.
ENGINE = "X-data-parallel-rank"
# The largest mean absolute difference, in nats, for the coarser dtype of trainers and server. Rounding to bfloat16
# gives up to 0.1 with tokens drawn at random, which are unlikely. Weights of another version of the model give several
# nats.
TOLERANCE = {"float32": 0.01, "float16": 0.1, "bfloat16": 0.5}
QUANTISED_TOLERANCE = 2.0


@dataclass(frozen=True)
class ProbedServer:
    """The facts that a probe needs about a server. `max_model_len` is its longest sequence in tokens. `dtype` is the
    dtype of its weights. It is None if they are quantised or the server does not report it. `engines` is the number of
    its data-parallel engines, each with weights of its own."""

    url: str
    max_model_len: int | None = None
    dtype: str | None = None
    engines: int = 1


def tolerance(trainers: str, server: str | None) -> float:
    """The largest allowed difference in nats, for the dtypes of trainers and server."""
    return max(TOLERANCE.get(dtype, QUANTISED_TOLERANCE) for dtype in (trainers, server or ""))


def verdict(probe: Probe, answered: Sequence[float], server: str | None) -> str | None:
    """One sentence that says what is wrong with a server's log-probabilities (in nats), or None if they are right. They
    may cover only the first tokens of the probe."""
    expected = probe.logprobs[: len(answered)]
    gaps = [abs(a - b) for a, b in zip(answered, expected, strict=True)]
    limit = tolerance(probe.dtype, server)
    mean = math.fsum(gaps) / len(gaps)
    if mean <= limit:  # this is false if a value is NaN
        return None
    return (
        f"it does not serve the weights of version {probe.version}: its log-probabilities of {len(gaps)} tokens differ "
        f"from the trainers' by {mean:.3g} on average and {max(gaps):.3g} at most (limit {limit:g} in "
        f"{server or 'its dtype'}; server {_some(answered)}, trainers {_some(expected)}); it gets no samples"
    )


async def prove(session: aiohttp.ClientSession, server: ProbedServer, probe: Probe | None, version: int) -> None:
    """Probe a server that has taken `version`, and let it serve that version. Raises ReceiverError with one sentence if
    the server fails the probe. It then still refuses to generate."""
    base = server.url.rstrip("/")
    if probe is not None:
        most = len(probe.tokens) if server.max_model_len is None else server.max_model_len - 1
        tokens = probe.tokens[:most]
        body = {
            "model": "actor",
            "token_ids": tokens,
            "sampling_params": {"temperature": 0.0, "max_tokens": 1, "prompt_logprobs": 0, "detokenize": False},
        }
        for engine in range(server.engines):
            headers = {PROBE_HEADER: str(version)} | ({ENGINE: str(engine)} if server.engines > 1 else {})
            reply = await post(session, f"{base}/inference/v1/generate", PROBE_SECONDS, body, headers)
            answered = read_logprobs(reply, tokens)
            if answered and (problem := verdict(probe, answered, server.dtype)) is not None:
                raise ReceiverError(problem)
    await post(session, f"{base}/dovetail/serve", PROBE_SECONDS, {"weight_version": version})


def read_logprobs(reply: Any, tokens: Sequence[int]) -> list[float]:
    """The log-probabilities of tokens[1:], in nats, from vLLM's answer. Raises ReceiverError if the answer has none."""
    try:
        rows = reply["prompt_logprobs"]
        return [float(rows[i][str(token)]["logprob"]) for i, token in enumerate(tokens) if i]
    except (TypeError, KeyError, IndexError, ValueError) as error:
        raise ReceiverError(
            f"it answered the probe of its weights without log-probabilities of the prompt ({type(error).__name__})"
        ) from error


def _some(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values[:3]) + (", ..." if len(values) > 3 else "")


# Receivers that fail within this time after the first failure may be the cause. Later ones only waited for them.
# Receivers that report that the transfer was cancelled also only waited.
BLAME_SECONDS = 1.0
# The probes of this many versions are kept, for servers that get a version from another server. Every lag is shorter.
MOST_PROBES = 16
# Every JSON parser can read integers of this size.
EPOCH_BITS = 50


@dataclass(frozen=True)
class Target:
    """An instance that will hold the new weights. A restarted process has another `incarnation`. `max_model_len`,
    `dtype` and `engines` are those of `dovetail.coordinator.workers.publishing.ProbedServer`. `version` is the version
    that it must hold. If it is None, that is the current one. `sends` says whether it exchanges versions with other
    servers."""

    name: str
    kind: str
    url: str
    incarnation: str
    world: int = 1
    max_model_len: int | None = None
    dtype: str | None = None
    engines: int = 1
    version: int | None = None
    sends: bool = False


@dataclass(frozen=True)
class Published:
    """The result of a publish. `errors` has the error of each receiver. It is None if the whole version arrived and a
    server serves it. `result` is None if the trainers failed to send. `blamed` names the receivers that failed first,
    which may have blocked the others, and those that serve other weights. The transfer of the bytes alone may have
    taken `byte_seconds`."""

    errors: dict[str, str | None]
    result: CommandResult | None
    blamed: frozenset[str] = frozenset()
    byte_seconds: float = 0.0


def receivers_of(targets: Sequence[Target]) -> list[Receiver]:
    """The receivers of the targets. The receivers of each model have the ranks 1, 2 and so on. Rollouts take the actor,
    and scorers take the critic."""
    offsets = {"actor": 1, "critic": 1}
    receivers = []
    for target in sorted(targets, key=lambda t: t.name):
        model = "actor" if target.kind == "rollout" else "critic"
        receivers.append(
            Receiver(
                name=target.name,
                kind="rollout" if target.kind == "rollout" else "scorer",
                models=[model],
                rank_offset=offsets[model],
                world=target.world,
                dtype=target.dtype,
            )
        )
        offsets[model] += target.world
    return receivers


class Publisher:
    """Publishes versions, and keeps the epoch of the communicators. A transfer may take `deadline_seconds` in addition
    to the time for its bytes. The trainers add that time. A new epoch begins when the receivers, their processes or the
    trainers' process groups change, and after each failure."""

    def __init__(self, trainers: TrainerGroup, session: aiohttp.ClientSession, deadline_seconds: float):
        self._trainers = trainers
        self._session = session
        self._deadline = deadline_seconds
        # A restarted coordinator must not reuse an epoch, because a receiver would then keep its old communicator. A
        # random start stays safe if the clock is set back, and with many transfers a second.
        self._epoch = secrets.randbits(EPOCH_BITS)
        self._members: frozenset[tuple[str, str]] | None = None
        self._expected: dict[tuple[int, int], asyncio.Future[Offer]] = {}
        self._probes: dict[int, Probe | None] = {}

    def offer(self, message: Offer) -> None:
        """Handle POST /v1/weights/offer. An offer that nobody waits for is dropped. The trainers give it up at its
        deadline."""
        future = self._expected.get((message.version, message.epoch))
        if future is not None and not future.done():
            future.set_result(message)

    async def publish(self, version: int, targets: Sequence[Target], beside: bool = False) -> Published:
        """Send `version` to all targets at once. `beside` says that the trainers keep the version and may train
        meanwhile. The result has the failures of receivers. Raises TrainerLost."""
        members = frozenset({(t.name, t.incarnation) for t in targets} | {("trainers", str(self._trainers.generation))})
        epoch_is_new = members != self._members
        if epoch_is_new:
            self._epoch += 1
        self._members = members
        receivers = receivers_of(targets)
        command = Publish(
            id=f"publish/{version}/{self._epoch}/{time.time_ns()}",
            version=version,
            epoch=self._epoch,
            receivers=receivers,
            deadline_seconds=self._deadline,
        )
        key = (version, self._epoch)
        expected: asyncio.Future[Offer] = asyncio.get_running_loop().create_future()
        self._expected[key] = expected
        sending = asyncio.create_task(self._trainers.execute(command, self._deadline + GRACE_SECONDS, beside=beside))
        errors: dict[str, str | None] = {r.name: "no offer came from the trainers" for r in receivers}
        failed: dict[str, float] = {}
        byte_seconds = 0.0

        def fail(name: str, error: str) -> None:
            if CALLED_OFF not in error:
                failed[name] = time.monotonic()
            self._trainers.cancel(command.id)

        try:
            both: set[asyncio.Future[Any]] = {sending, expected}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if expected.done():
                # The trainers know how many bytes they send.
                allowed = expected.result().deadline_seconds
                self._trainers.extend(command.id, allowed + GRACE_SECONDS)
                byte_seconds = max(0.0, allowed - self._deadline)
                urls = {t.name: t.url for t in targets}
                errors = await push_offer(
                    self._session,
                    expected.result(),
                    [(r, urls[r.name]) for r in receivers],
                    epoch_is_new,
                    on_error=fail,
                )
            result = await sending
        except TrainerError as error:
            self._members = None
            problems: dict[str, str | None] = {name: text or str(error) for name, text in errors.items()}
            return Published(problems, None, _first(failed), byte_seconds)
        except BaseException:
            self._members = None
            raise
        finally:
            self._expected.pop(key, None)
            await cancel([sending])
        if any(target.kind == "rollout" for target in targets):
            self._remember(version, result.probe)
        unproved = await self._prove(version, [t for t in targets if errors[t.name] is None], result.probe)
        errors |= unproved
        if any(text is not None for text in errors.values()):
            self._members = None
        return Published(errors, result, _first(failed) | unproved.keys(), byte_seconds)

    def has_probe(self, version: int) -> bool:
        """Whether a server can be asked to prove that it serves a version that another server has sent it. A restarted
        coordinator has no probes until the trainers publish again."""
        return version in self._probes

    async def relay(self, version: int, sender: Target, receiver: Target) -> str | None:
        """Let the rollout `sender`, which serves `version`, send it to the rollout `receiver`. Returns None if the
        receiver serves it now. Otherwise it returns the error, a sentence that names the sender."""
        if version not in self._probes:
            # The probe was there when the sender was chosen. The receiver may have taken minutes to wake up since then.
            return f"version {version} is not sent to {receiver.name} any more: too many newer ones were published"
        # Versions that are published meanwhile may replace it.
        probe = self._probes[version]
        self._epoch += 1
        # The receiver leaves the communicators that it shared with others.
        self._members = None
        (alone,) = receivers_of([receiver])
        request = SendOn(
            version=version, epoch=self._epoch, world_size=1 + alone.world, deadline_seconds=self._deadline
        )
        try:
            url = f"{sender.url.rstrip('/')}/dovetail/send_weights"
            answer = await post(self._session, url, CALL_SECONDS, request.model_dump(mode="json"))
            offer = Offer.model_validate(answer)
        except (ReceiverError, ValueError) as error:
            return f"{sender.name} cannot send version {version}: {error}"
        errors = await push_offer(self._session, offer, [(alone, receiver.url)], True)
        if (problem := errors[receiver.name]) is not None:
            return f"version {version} did not come from {sender.name}: {problem}"
        unproved = await self._prove(version, [receiver], probe)
        return f"version {version} came from {sender.name}, but {unproved[receiver.name]}" if unproved else None

    def _remember(self, version: int, probe: Probe | None) -> None:
        self._probes[version] = probe
        for old in sorted(self._probes)[:-MOST_PROBES]:
            del self._probes[old]

    async def _prove(self, version: int, targets: Sequence[Target], probe: Probe | None) -> dict[str, str | None]:
        """Probe the servers among `targets`, and let those that pass serve. Returns the errors of the others."""

        async def one(target: Target) -> str | None:
            try:
                server = ProbedServer(target.url, target.max_model_len, target.dtype, target.engines)
                await prove(self._session, server, probe, version)
            except ReceiverError as error:
                return str(error)
            return None

        servers = [target for target in targets if target.kind == "rollout"]
        found = await asyncio.gather(*(one(target) for target in servers))
        return {target.name: error for target, error in zip(servers, found, strict=True) if error is not None}


def _first(failed: Mapping[str, float]) -> frozenset[str]:
    return frozenset(name for name, at in failed.items() if at - min(failed.values()) <= BLAME_SECONDS)
