"""An environment that is a Python class of the user's. Its public methods are the tools.

    class Guess:
        def reset(self, secret: int) -> str:      # the prompt record's fields; what it returns is told to the model
        def guess(self, number: int) -> str:      # a tool: typed arguments, and a docstring that describes them
        def get_reward(self) -> float:            # optional

Arguments are converted to the types of the method, as pydantic does it. If that cannot be, the model is told so. A tool
may raise ValueError: the call was wrong, and the model is told so, too. Any other error is a failure of the
environment. After a death, the calls of an episode are made again on a new object, in their order. So a tool must
change nothing but its object."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Coroutine, Mapping
from functools import cached_property
from typing import Any, TypeVar, get_type_hints

from pydantic import PydanticUserError, TypeAdapter, ValidationError

from dovetail.coordinator.sessions.effects import Failed, storable
from dovetail.coordinator.user_code.user_requests import raised

# The types of a method's arguments, by their names.
_Types = Mapping[str, TypeAdapter[Any]]

_T = TypeVar("_T")
# The methods of an environment that are no tools.
_OWN = ("reset", "get_reward")


class EnvironmentClass:
    """A class as an environment."""

    def __init__(self, made: type, name: str) -> None:
        """`name` is the name in the manifest, for errors. Raises ValueError with one sentence."""
        reset: Any = getattr(made, "reset", None)
        if not inspect.isclass(made) or not callable(reset):
            raise ValueError(f"{name} must be a class with a method reset, which begins an episode")
        self.made, self._name = made, name
        self._methods = {
            key: each for key, each in vars_of(made).items() if not key.startswith("_") and key not in _OWN
        }
        if not self._methods:
            raise ValueError(f"{name} has no public method besides reset and get_reward, so it has no tool")
        self._types = {key: _types(method, f"{name}.{key}") for key, method in self._methods.items()}
        self._takes_prompt = "prompt" in inspect.signature(reset).parameters

    @cached_property
    def tools(self) -> list[Mapping[str, Any]]:
        """The function schemas of its methods, as in OpenAI's API. Raises ValueError with one sentence."""
        from transformers.utils import get_json_schema

        found = []
        for key, method in self._methods.items():
            try:
                found.append(get_json_schema(method))
            except Exception as error:  # transformers raises several kinds, all about the user's method
                what = str(error).splitlines()[0]
                raise ValueError(
                    f"the method {key} of {self._name} is a tool, but its schema cannot be made: {what}; give each "
                    "argument a type, and describe the method and each argument in its docstring (Args:)"
                ) from error
        return found

    async def begin(self, record: Mapping[str, Any]) -> PythonEpisode:
        """A new object of the class, which begins an episode with the fields of a prompt record. It gets the "prompt",
        too, if it names it, as an environment of TRL may. Raises Failed."""
        given = {name: value for name, value in record.items() if name != "prompt" or self._takes_prompt}

        async def reset() -> tuple[Any, Any]:
            state: Any = self.made()
            return state, await _awaited(state.reset(**given))

        what = f"{self._name}.reset"
        state, observation = await _ran(what, reset())
        if observation is not None and not isinstance(observation, str):
            raise Failed(f"{what} returned {type(observation).__name__}; return a text or None")
        return PythonEpisode(state, storable(what, observation or ""), self._types, self._name)


class PythonEpisode:
    """One object of the user's class, whose state ends with its process. `observation` is what the episode begins with.
    `tools` has the types of each tool's arguments."""

    def __init__(self, state: Any, observation: str, tools: Mapping[str, _Types], name: str) -> None:
        self.observation = observation
        self._state, self._tools, self._name = state, tools, name

    async def make(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Call the method. A wrong call is answered with a sentence that begins with "error: ". Raises Failed."""
        if name not in self._tools:
            return f"error: there is no tool {name}; the tools are {', '.join(sorted(self._tools))}"
        what, method = f"{self._name}.{name}", getattr(self._state, name)
        try:
            inspect.signature(method).bind(**arguments)
            converted = _converted(arguments, self._tools[name])
        except (TypeError, ValueError) as error:
            return storable(what, f"error: {name}: {error}")

        async def call() -> str:
            try:
                return str(await _awaited(method(**converted)))
            except ValueError as error:
                return f"error: {error}"

        return storable(what, await _ran(what, call()))

    async def reward(self) -> float | None:
        """What the episode earned. None if the class has no get_reward. Raises Failed."""
        if not callable(getattr(self._state, "get_reward", None)):
            return None

        async def earned() -> float:
            return float(await _awaited(self._state.get_reward()))

        found = await _ran(f"{self._name}.get_reward", earned())
        if not math.isfinite(found):
            raise Failed(f"{self._name}.get_reward returned {found}, which is no finite number")
        return found


async def _awaited(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result


async def _ran(what: str, work: Coroutine[Any, Any, _T]) -> _T:
    """The result of the user's code. Raises Failed for whatever it raises, also SystemExit."""
    try:
        return await work
    except BaseException as error:
        found = raised(error, {__file__})
        at = f" at {found['frames'][-1]}" if found["frames"] else ""
        raise Failed(f"{what} raised {found['what']}{at}") from error


def vars_of(made: type) -> dict[str, Any]:
    """The functions of a class and of the classes that it extends, by name, in the order of their definition."""
    found: dict[str, Any] = {}
    for each in reversed(made.__mro__[:-1]):
        found |= {name: value for name, value in vars(each).items() if inspect.isfunction(value)}
    return found


def _types(method: Callable[..., Any], name: str) -> _Types:
    """Raises ValueError, which names the argument, for a type that JSON cannot give."""
    found = {}
    for argument, kind in get_type_hints(method, include_extras=True).items():
        if argument == "return":
            continue
        try:
            found[argument] = TypeAdapter(kind)
        except PydanticUserError as error:
            raise ValueError(
                f"the argument {argument} of {name} has the type {kind}, which cannot be read from JSON; take a type "
                "that pydantic knows"
            ) from error
    return found


def _converted(arguments: Mapping[str, Any], types: _Types) -> dict[str, Any]:
    """The arguments in the types of the method. Raises ValueError with one sentence for the model."""
    found = dict(arguments)
    for name in filter(arguments.__contains__, types):
        try:
            found[name] = types[name].validate_python(arguments[name])
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            where = "".join(f"[{part!r}]" for part in first["loc"])
            raise ValueError(f"{name}{where}: {first['msg']}") from None
    return found
