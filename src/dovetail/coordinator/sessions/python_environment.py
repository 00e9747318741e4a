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
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

from pydantic import PydanticUserError, TypeAdapter, ValidationError

from dovetail.coordinator.sessions.effects import Failed, NotMade, ToolCall
from dovetail.manifest.callables import load_callable

# The types of a method's arguments, by their names.
_Types = Mapping[str, TypeAdapter[Any]]

# The methods of an environment that are no tools.
_OWN = ("reset", "get_reward")


class EnvironmentClass:
    """A class as an environment. `tools` has the function schemas of its methods, as in OpenAI's API."""

    def __init__(self, made: type, name: str) -> None:
        """`name` is the name in the manifest, for errors. Raises ValueError with one sentence."""
        from transformers.utils import get_json_schema

        if not inspect.isclass(made) or not callable(getattr(made, "reset", None)):
            raise ValueError(f"{name} must be a class with a method reset, which begins an episode")
        self._class, self._name = made, name
        methods = {key: each for key, each in vars_of(made).items() if not key.startswith("_") and key not in _OWN}
        if not methods:
            raise ValueError(f"{name} has no public method besides reset and get_reward, so it has no tool")
        self.tools: list[Mapping[str, Any]] = []
        self._types: dict[str, _Types] = {}
        for key, method in methods.items():
            try:
                self.tools.append(get_json_schema(method))
            except Exception as error:  # transformers raises several kinds, all about the user's method
                what = str(error).splitlines()[0]
                raise ValueError(
                    f"the method {key} of {name} is a tool, but its schema cannot be made: {what}; give each argument "
                    "a type, and describe the method and each argument in its docstring (Args:)"
                ) from error
            self._types[key] = _types(method, f"{name}.{key}")

    def begin(self, record: Mapping[str, Any]) -> PythonEpisode:
        """A new object of the class, which begins an episode with the fields of a prompt record. Raises Failed."""
        try:
            state: Any = self._class()
            observation = state.reset(**record)
        except Exception as error:
            raise _failed(f"{self._name}.reset", error) from error
        if observation is not None and not isinstance(observation, str):
            raise Failed(f"{self._name}.reset returned {type(observation).__name__}; return a text or None")
        told = _told(f"{self._name}.reset", observation or "")
        return PythonEpisode(state, told, self._types, self._name)


class PythonEpisode:
    """One object of the user's class: a ToolEnvironment whose state ends with its process. `observation` is what the
    episode begins with. `tools` has the types of each tool's arguments."""

    def __init__(self, state: Any, observation: str, tools: Mapping[str, _Types], name: str) -> None:
        self.observation = observation
        self._state, self._tools, self._name = state, tools, name

    async def make(self, call: ToolCall) -> str:
        """Call the method. A wrong call is answered with a sentence that begins with "error: ". Raises Failed."""
        if call.name not in self._tools:
            return f"error: there is no tool {call.name}; the tools are {', '.join(sorted(self._tools))}"
        method = getattr(self._state, call.name)
        try:
            inspect.signature(method).bind(**call.arguments)
            arguments = _converted(call.arguments, self._tools[call.name])
        except (TypeError, ValueError) as error:
            return _told(f"{self._name}.{call.name}", f"error: {call.name}: {error}")
        try:
            found = method(**arguments)
            if inspect.isawaitable(found):
                found = await found
            text = str(found)
        except ValueError as error:
            text = f"error: {error}"
        except Exception as error:
            raise _failed(f"{self._name}.{call.name}", error) from error
        return _told(f"{self._name}.{call.name}", text)

    async def recall(self, call: ToolCall) -> str:
        """Raises NotMade: this object is new, and nobody has called it."""
        raise NotMade

    async def restore(self, call: ToolCall, observation: str) -> None:
        """Call the method again, so that the object is as it was."""
        await self.make(call)

    async def end(self) -> None:
        """There is nothing to free."""

    async def reward(self) -> float | None:
        """What the episode earned. None if the class has no get_reward. Raises Failed."""
        if not callable(getattr(self._state, "get_reward", None)):
            return None
        try:
            found = float(self._state.get_reward())
        except Exception as error:
            raise _failed(f"{self._name}.get_reward", error) from error
        if not math.isfinite(found):
            raise Failed(f"{self._name}.get_reward returned {found}, which is no finite number")
        return found


class PythonEnvironment:
    """The environments of a job, in this process. `name` is the class in the manifest, which is imported from
    `folder`."""

    def __init__(self, name: str, folder: str) -> None:
        self._name, self._folder = name, folder
        self._class: EnvironmentClass | None = None

    @property
    def tools(self) -> list[Mapping[str, Any]]:
        assert self._class is not None, "it is open"
        return self._class.tools

    async def open(self) -> None:
        """Import the class. Raises ValueError with one sentence."""
        if self._class is None:
            found: Any = load_callable(self._name, "environment.function", self._folder)
            self._class = EnvironmentClass(found, self._name)

    async def begin(self, episode: str, record: Mapping[str, Any]) -> PythonEpisode:
        """A new object of the class. Raises Failed."""
        assert self._class is not None, "it is open"
        return self._class.begin(record)

    async def close(self) -> None:
        """There is nothing to end."""


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


def _told(what: str, text: str) -> str:
    """The text that a method answered. Raises Failed if it cannot be stored."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Failed(
            f"{what} answered with half of a character (a lone surrogate); decode bytes with errors='replace'"
        ) from error
    return text


def _failed(what: str, error: Exception) -> Failed:
    text = str(error).splitlines()
    return Failed(f"{what} raised {type(error).__name__}" + (f": {text[0]}" if text else ""))
