"""Generates responses without training. A program starts vLLM servers for a model folder or for a finished run's
model, and ends them when it has done its work.

    with LLM("runs/quickstart") as llm:
        for output in llm.chat([{"role": "user", "content": "What is a cat?"}], SamplingParams(n=4, temperature=0.7)):
            for completion in output.outputs:
                print(completion.text, completion.cumulative_logprob)

Classes and methods have the names of vLLM's own LLM class. The servers are the same as in `dovetail serve`, and the
requests are the same as for a job's rollouts. There are no trainers, no scorers and no rewards."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import dataclasses
import importlib.util
import secrets
import shutil
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from pydantic import ValidationError

from dovetail.gpus.nvidia_driver import cuda_devices
from dovetail.manifest.training_types import Generation
from dovetail.manifest.types import RLHFJob
from dovetail.protocol.errors import RunError
from dovetail.protocol.files.durable import read_object
from dovetail.protocol.process.extras import import_error
from dovetail.protocol.sampling import COUNTER_SAMPLER, sampling_params

try:
    import aiohttp

    from dovetail.coordinator.data.data_error import DataError
    from dovetail.coordinator.data.text import tokenizer as tokenizers
    from dovetail.coordinator.data.text.chat_template import Message, chat_format
    from dovetail.coordinator.data.text.texts import Texts
    from dovetail.coordinator.data.text.tokenize import Encoder
    from dovetail.coordinator.samples.requests import RequestRefused, ServerFailure
    from dovetail.local.vllm_stream import stream
    from dovetail.protocol.http.client_session import client_session, resend
    from dovetail.protocol.sampling import derived_seed
    from dovetail.tools.serving.chat import REPLY_ENDS
    from dovetail.tools.serving.served_result import (
        check_served,
        has_own_template,
        last_error,
        model_folder,
        own_server,
    )
except ModuleNotFoundError as error:
    raise import_error("dovetail.local.llm", ["coordinator"], error) from error

T = TypeVar("T")
# The maximum number of requests that a server gets at once. vLLM would let more of them wait.
CONCURRENT = 256
# A server sends an event after so many tokens of a response.
INTERVAL = 64
MODEL = "actor"
CONNECT_SECONDS = 30.0
# The longest time between two events of a response.
SILENT_SECONDS = 600.0
CLOSE_SECONDS = 60.0
# A response that fails is begun at most so many times.
TRIES = 3
_NO_LIMIT = 2**31


@dataclass(frozen=True)
class SamplingParams:
    """Settings for drawing responses. Raises ValueError for values that no server accepts. `n`: the number of responses
    to each prompt. `temperature`: 0 always takes the most likely token. `top_p`: the least probability mass to keep. 1
    switches it off. `top_k`: the number of most likely tokens to keep. 0 switches it off. `min_tokens`, `max_tokens`:
    limits of a response. `stop`: strings that end a response. `seed`: calls with equal prompts, settings and seed
    return equal responses. None: each call returns different ones."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_tokens: int = 0
    max_tokens: int = 128
    stop: Sequence[str] = ()
    seed: int | None = 0

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ValueError(f"n is {self.n}; it is the number of responses to a prompt, 1 or more")
        if isinstance(self.stop, str):
            raise ValueError("stop is a string; give a list of strings")
        self.generation()

    def generation(self) -> Generation:
        """The same settings as a manifest's `generation`. Raises ValueError."""
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature}; it must be 0 or more")
        try:
            found = Generation(
                max_tokens=self.max_tokens,
                min_tokens=self.min_tokens,
                top_p=self.top_p,
                top_k=self.top_k,
                stop=list(self.stop),
            )
        except ValidationError as error:
            first = error.errors()[0]
            name = "_".join(str(part) for part in first["loc"][:1])
            raise ValueError(f"{_snake(name)} is {first['input']!r}: {first['msg'].lower()}") from error
        # A job's rollouts never draw greedily, but its evaluations do.
        return found.model_copy(update={"temperature": self.temperature})


@dataclass(frozen=True)
class CompletionOutput:
    """One response. `index`: its number among the responses to the prompt. `text`: the text without the tokens that end
    it and without the stop string. `token_ids`: the tokens that were drawn, with the end token. `logprobs`: the natural
    logarithm of each token's probability, at temperature 1 and before top-k and top-p. `finish_reason`: "stop", or
    "length" if the response was cut at `max_tokens`."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str

    @property
    def cumulative_logprob(self) -> float:
        """The log-probability of the whole response."""
        return sum(self.logprobs)


@dataclass(frozen=True)
class RequestOutput:
    """A prompt with its responses. `prompt`: the prompt as text. If there was a dialogue, it has the chat template.
    None if the prompt was given as token ids. `prompt_token_ids`: the tokens that the model read."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]


@dataclass
class _Server:
    url: str
    key: str
    log: Path
    out: str | None = None
    session: aiohttp.ClientSession | None = None


@dataclass
class _Draw:
    """A response that is being drawn."""

    prompt: list[int]
    seed: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reason: str = ""
    tries: int = 0

    def begin(self) -> None:
        self.tokens, self.logprobs, self.reason = [], [], ""
        self.tries += 1

    def take(self, tokens: list[int], logprobs: list[float], reason: str | None) -> None:
        self.tokens += tokens
        self.logprobs += logprobs
        self.reason = reason or self.reason


class LLM:
    """A language model behind vLLM servers of its own. Use it as a context manager, or call `open` and `close`, for
    example in a notebook. It is synchronous. Use it from one thread. Errors are a `RunError` with one sentence.

    `path`: a model folder in Hugging Face format, or the folder of a run. `model`: which of the run's models to use:
    actor, sft, actor-best or actor-ema. `servers`: the number of servers. They share the prompts.
    `tensor_parallel_size`: the number of GPUs of each server. On a machine without GPUs servers run on CPUs.
    `vllm_args`: further arguments of `vllm serve`, for example ["--gpu-memory-utilization", "0.5"]. `log_dir`: the
    folder of the servers' logs. By default it is that of the run, or a temporary folder.

    A response depends only on the weights, the prompt, its place in the list, the response's number and the settings.
    The other prompts, the number of servers and failures of servers have no effect. On CPUs it is drawn as a job's
    rollouts draw it. Two tokens may swap where rounding makes their scores equal, as in jobs (docs/rollouts.md)."""

    def __init__(
        self,
        path: Path | str,
        *,
        model: str = "actor",
        servers: int = 1,
        tensor_parallel_size: int = 1,
        vllm_args: Sequence[str] = (),
        log_dir: Path | str | None = None,
    ) -> None:
        self.folder, self._run_dir = _resolved(Path(path).resolve(), model)
        if importlib.util.find_spec("vllm") is None:
            extra = "rollout-gpu" if cuda_devices() else "rollout-cpu"
            raise RunError(f"generation needs vLLM: pip install 'dovetail-rlhf[{extra}]'")
        if servers < 1 or tensor_parallel_size < 1:
            raise ValueError(f"servers is {servers} and tensor_parallel_size {tensor_parallel_size}; 1 is the least")
        self._devices = cuda_devices()
        if self._devices and (needed := servers * tensor_parallel_size) > len(self._devices):
            raise RunError(
                f"{servers} servers of {tensor_parallel_size} GPUs each need {needed} GPUs, and this machine shows "
                f"{len(self._devices)}; lower servers or tensor_parallel_size"
            )
        check_served(self.folder, not self._devices)
        try:
            tokenizer = tokenizers.load(self.folder, "model")
        except DataError as error:
            raise RunError(str(error)) from error
        self._encoder = Encoder(tokenizer, _NO_LIMIT, _NO_LIMIT)
        self._texts = Texts(tokenizer, self.folder)
        self._count, self._width, self._given = servers, tensor_parallel_size, list(vllm_args)
        self._log_dir = Path(log_dir) if log_dir is not None else None
        self._stack = contextlib.ExitStack()
        self._servers: list[_Server] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._max_model_len = 0

    # ------------------------------------------------------------ methods for users

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, from transformers."""
        return self._encoder.tokenizer

    @property
    def max_model_len(self) -> int:
        """The maximum number of tokens of prompt and response together."""
        return self._max_model_len

    def get_default_sampling_params(self) -> SamplingParams:
        """The settings that `generate` uses by default. They are the run's own (spec.generation), or those in the model
        folder's generation_config.json. Use `dataclasses.replace` to change some of them."""
        if self._run_dir is not None:
            with contextlib.suppress(OSError, ValueError):
                job = RLHFJob.model_validate_json((self._run_dir / "job.json").read_text(encoding="utf-8"))
                return _as_params(job.spec.generation)
        return _of_config(read_object(self.folder / "generation_config.json"))

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]] | str,
        sampling_params: SamplingParams | None = None,
        *,
        on_progress: Callable[[int, int], object] | None = None,
    ) -> list[RequestOutput]:
        """Respond to prompts, and return the results in their order. A prompt is a text, which is continued unchanged,
        or a list of token ids. `on_progress(done, total)` counts finished responses. It is called from another thread.
        Raises ValueError for a prompt that is too long, and RunError if no server works any more."""
        given: list[str | Sequence[int]] = [prompts] if isinstance(prompts, str) else list(prompts)
        params = sampling_params or self.get_default_sampling_params()
        texts = [prompt if isinstance(prompt, str) else None for prompt in given]
        tokens = [self._tokens(number, prompt) for number, prompt in enumerate(given)]
        return self._outputs(texts, tokens, params, on_progress)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | None = None,
        *,
        on_progress: Callable[[int, int], object] | None = None,
    ) -> list[RequestOutput]:
        """Generate the assistant's next turn in one dialogue or in several. A message has "role" and "content". The
        tokenizer's chat template turns dialogues into text. Without a template the text has the form that training uses
        (`Human:`, `Assistant:`). Then these strings end a reply, unless `stop` has others. Raises the errors of
        `generate`."""
        params = sampling_params or self.get_default_sampling_params()
        if not params.stop and not has_own_template(self.folder):
            params = dataclasses.replace(params, stop=REPLY_ENDS)
        one = bool(messages) and isinstance(messages[0], Mapping)
        dialogues: list[Any] = [messages] if one else list(messages)
        form = chat_format(self.tokenizer)
        texts: list[str] = []
        for number, dialogue in enumerate(dialogues):
            for message in dialogue:
                if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
                    raise ValueError(f"dialogue {number}: {message!r} is no message; it needs a role and a content")
            try:
                texts.append(form.prompt([dict(message) for message in dialogue]))
            except Exception as error:  # a template may raise any error
                raise ValueError(f"dialogue {number}: the chat template refuses it: {error}") from error
        return self.generate(texts, params, on_progress=on_progress)

    def open(self) -> LLM:
        """Start the servers, and wait until they serve. Raises RunError."""
        if self._loop is not None:
            return self
        atexit.register(self.close)
        try:
            self._start_servers()
            self._start_loop()
            self._max_model_len = self._run(self._ask_length())
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        """End the servers. A second call does nothing."""
        atexit.unregister(self.close)
        self._stack.close()
        self._servers = []

    def __enter__(self) -> LLM:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------ inner parts

    def _tokens(self, number: int, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            tokens = self._encoder.encode(prompt)
        elif isinstance(prompt, int):
            raise ValueError("prompts is a list of numbers; give a list of prompts, each a text or a list of token ids")
        else:
            try:
                tokens = [int(token) for token in prompt]
            except (TypeError, ValueError):
                raise ValueError(
                    f"prompt {number} must be a text or a list of token ids; `chat` takes messages"
                ) from None
        if not tokens:
            raise ValueError(f"prompt {number} is empty")
        if self._max_model_len and len(tokens) >= self._max_model_len:
            raise ValueError(
                f"prompt {number} has {len(tokens)} tokens; the model takes {self._max_model_len} with the response"
            )
        return tokens

    def _outputs(
        self,
        texts: Sequence[str | None],
        prompts: Sequence[list[int]],
        params: SamplingParams,
        on_progress: Callable[[int, int], object] | None,
    ) -> list[RequestOutput]:
        if self._loop is None:
            raise RuntimeError("use the model in a with statement, or call open()")
        seed = secrets.randbits(63) if params.seed is None else params.seed
        draws = [
            [_Draw(prompt, derived_seed("generate", seed, number, i)) for i in range(params.n)]
            for number, prompt in enumerate(prompts)
        ]
        self._run(self._draw([draw for each in draws for draw in each], params.generation(), on_progress))
        return [
            RequestOutput(text, prompt, [self._completion(i, draw, params.stop) for i, draw in enumerate(each)])
            for text, prompt, each in zip(texts, prompts, draws, strict=True)
        ]

    def _completion(self, index: int, draw: _Draw, stops: Sequence[str]) -> CompletionOutput:
        text = self._texts.of(draw.tokens).text
        if draw.reason == "stop":
            text = text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]
        return CompletionOutput(index, text, draw.tokens, draw.logprobs, draw.reason)

    async def _draw(
        self, draws: Sequence[_Draw], generation: Generation, on_progress: Callable[[int, int], object] | None
    ) -> None:
        """Fill all draws. A draw that a server did not finish starts anew, and gets the same tokens."""
        waiting, done = deque(draws), 0

        async def work(server: _Server) -> None:
            nonlocal done
            while waiting and server.out is None:
                draw = waiting.popleft()
                draw.begin()
                try:
                    await stream(self._session(server), server.url, self._body(draw, generation), draw.take)
                except RequestRefused as error:
                    raise RunError(f"vLLM refuses the request: {error}") from error
                except ServerFailure as error:
                    waiting.append(draw)
                    if not await self._healthy(server):
                        server.out = f"{last_error(server.log)} (log: {server.log})"
                    elif draw.tries >= TRIES:
                        raise RunError(f"a response failed {TRIES} times: {error} (log: {server.log})") from error
                else:
                    done += 1
                    if on_progress is not None:
                        on_progress(done, len(draws))

        while waiting:
            alive = [server for server in self._servers if server.out is None]
            if not alive:
                raise RunError(f"no vLLM server works any more: {self._servers[0].out}")
            share = min(CONCURRENT, -(-len(waiting) // len(alive)))
            tasks = [asyncio.ensure_future(work(server)) for server in alive for _ in range(share)]
            try:
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()

    def _body(self, draw: _Draw, generation: Generation) -> dict[str, Any]:
        room = min(generation.max_tokens, self._max_model_len - len(draw.prompt))
        params = sampling_params(generation, draw.seed, room, "native" if self._devices else "counter")
        return {
            "request_id": secrets.token_hex(8),
            "model": MODEL,
            "token_ids": draw.prompt,
            "sampling_params": {**params, "stream_interval": INTERVAL},
            "stream": True,
        }

    def _session(self, server: _Server) -> aiohttp.ClientSession:
        if server.session is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=SILENT_SECONDS)
            headers = {"Authorization": f"Bearer {server.key}", "Content-Type": "application/json"}
            server.session = client_session(timeout=timeout, headers=headers, middlewares=[resend])
        return server.session

    async def _healthy(self, server: _Server) -> bool:
        timeout = aiohttp.ClientTimeout(total=CONNECT_SECONDS)
        with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
            async with self._session(server).get(f"{server.url}/health", timeout=timeout) as reply:
                return bool(reply.status == 200)
        return False

    async def _ask_length(self) -> int:
        try:
            async with self._session(self._servers[0]).get(f"{self._servers[0].url}/v1/models") as reply:
                return int((await reply.json())["data"][0]["max_model_len"])
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError, LookupError, TypeError) as error:
            raise RunError(f"the vLLM server does not say what it serves: {error}") from error

    # ------------------------------------------------------------ starting and ending

    def _start_servers(self) -> None:
        logs = self._logs()
        on_cpu = not self._devices
        given = ["--enable-scale-out", *(["--logits-processors", COUNTER_SAMPLER] if on_cpu else [])]
        if self._width > 1:
            given += ["--tensor-parallel-size", str(self._width)]
        given_up = threading.Event()

        def start(number: int) -> _Server:
            log = logs / f"generate-{self.folder.name}-{number}.log"
            mine = self._devices[number * self._width : (number + 1) * self._width]
            environment = {"CUDA_VISIBLE_DEVICES": ",".join(mine)} if mine else {}
            arguments = [*given, *self._given]
            own = own_server(self.folder, MODEL, on_cpu, log, _quiet, arguments, environment, given_up=given_up.is_set)
            return _Server(*self._stack.enter_context(own), log)

        if self._count == 1:
            self._servers = [start(0)]  # in this thread, so that Ctrl-C ends it
            return
        with ThreadPoolExecutor(self._count) as pool:
            starting = [pool.submit(start, number) for number in range(self._count)]
            try:
                for one in as_completed(starting):
                    one.result()
            except BaseException:
                given_up.set()  # the others may take minutes, also after Ctrl-C
                raise
        self._servers = [one.result() for one in starting]

    def _logs(self) -> Path:
        """The folder of the servers' logs. A temporary folder is deleted at the end, except if no server started."""
        if self._log_dir is not None:
            return self._log_dir
        if self._run_dir is not None:
            return self._run_dir / "logs"
        folder = Path(tempfile.mkdtemp(prefix="dovetail-"))
        self._stack.callback(lambda: shutil.rmtree(folder, ignore_errors=True) if self._servers else None)
        return folder

    def _start_loop(self) -> None:
        """Start an event loop in a thread, because in a notebook this thread already has one."""
        self._loop = loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, name="dovetail-llm", daemon=True)
        thread.start()

        def stop() -> None:
            async def leave() -> None:
                for server in self._servers:
                    if server.session is not None:
                        await server.session.close()

            self._run(leave(), CLOSE_SECONDS)
            loop.call_soon_threadsafe(loop.stop)
            thread.join(CLOSE_SECONDS)
            loop.close()
            self._loop = None

        self._stack.callback(stop)

    def _run(self, work: Coroutine[Any, Any, T], seconds: float | None = None) -> T:
        """Run `work` on the event loop. Ctrl-C ends the work, and the servers stay."""
        assert self._loop is not None
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(seconds)
        except BaseException:
            future.cancel()
            raise


def _quiet(_: str) -> None:
    pass


def _resolved(path: Path, model: str) -> tuple[Path, Path | None]:
    """The model's folder, and its run's folder if `path` is a run. Raises RunError."""
    config = read_object(path / "config.json")
    run_dir = None if config else path
    folder = path if run_dir is None else model_folder(path, model)
    kinds = [str(kind) for kind in (config or read_object(folder / "config.json")).get("architectures") or []]
    if any("SequenceClassification" in kind for kind in kinds):
        raise RunError(f"{folder} is a model that scores texts; name a language model, such as the run's actor or sft")
    return folder, run_dir


def _as_params(generation: Generation) -> SamplingParams:
    return SamplingParams(
        temperature=generation.temperature,
        top_p=generation.top_p,
        top_k=generation.top_k,
        min_tokens=generation.min_tokens,
        max_tokens=generation.max_tokens,
        stop=tuple(generation.stop),
    )


def _of_config(config: Mapping[str, Any]) -> SamplingParams:
    """The settings in a generation_config.json. A setting that is missing there has its default."""
    names = {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "max_new_tokens": "max_tokens"}
    return SamplingParams(**{ours: config[theirs] for theirs, ours in names.items() if config.get(theirs) is not None})


def _snake(name: str) -> str:
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name)
