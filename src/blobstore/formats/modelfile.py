"""Modelfile: a model's texts and settings, from a Modelfile or from options. Pure.

Source: ollama/ollama@0265d512 x/create/client/create.go `ConfigFromModelfile`, `newManifestWriter`,
`resolveParserName` and `createModelfileLayers`, unless a function says otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from blobstore.errors import (
    UnsupportedSourceError,
    UsageError,
    quoted,
)
from blobstore.formats import strictjson
from blobstore.formats.documents import (
    LICENSE_MEDIA_TYPE,
    MESSAGES_MEDIA_TYPE,
    PARAMS_MEDIA_TYPE,
    REQUIRED_OLLAMA,
    SYSTEM_MEDIA_TYPE,
    TEMPLATE_MEDIA_TYPE,
    ModelConfig,
)
from blobstore.formats.modelfile_commands import (
    DEPRECATED,
    MAX_MODELFILE,
    RULE,
    Command,
    ParameterValue,
    add_parameter,
    encode_parameters,
    error_at,
    read_script,
)

_T = TypeVar("_T")
MAX_LICENSES: Final = 1000
ROLES: Final = ("system", "user", "assistant")
_ONCE: Final = ("from", "draft")
_NUMBER = "(?:0|[1-9][0-9]*)"
_PRE = f"(?:{_NUMBER}|[0-9]*[A-Za-z-][0-9A-Za-z-]*)"
_BUILD = "[0-9A-Za-z-]+"
_VERSION = re.compile(
    rf"({_NUMBER})(?:\.({_NUMBER})(?:\.({_NUMBER})(?P<pre>-{_PRE}(?:\.{_PRE})*)?(?:\+{_BUILD}(?:\.{_BUILD})*)?)?)?"
)
_MAX_VERSION = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Modelfile:
    """The content of a Modelfile. A field that it does not set is None or empty; "" is set.

    ``source`` and ``draft`` are paths as written (`resolve_path`), ``messages`` pairs of role and
    text, ``notes`` sentences about commands and characters that Ollama ignores, and we do too.
    """

    source: str | None = None
    template: str | None = None
    system: str | None = None
    licenses: tuple[str, ...] = ()
    parameters: Mapping[str, ParameterValue] = field(default_factory=dict)
    parser: str | None = None
    renderer: str | None = None
    requires: str | None = None
    draft: str | None = None
    messages: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()

    @classmethod
    def parse(cls, raw: bytes, what: str = "Modelfile") -> Modelfile:
        """Return the Modelfile in ``raw``.

        The last of equal commands counts, but all licences, stop texts and messages are kept
        (Ollama's import of safetensors keeps the last licence and drops messages).

        Raises: as `read_script`; DocumentError (rule T1) with the line and the command for a
        missing or second FROM, a second DRAFT, an unknown parameter or role, a value of the wrong
        type, an invalid version; UnsupportedSourceError for ADAPTER; LimitExceededError over 1000
        licences.
        """
        script = read_script(raw, what)
        commands = {command.name: command for command in script.commands}
        _check_sources(script.commands, what)
        if "from" not in commands:
            hint = "Begin with FROM and the folder of the checkpoint."
            raise error_at(what, 1, "the FROM command is missing", hint)
        texts = {name: command.text for name, command in commands.items()}
        licenses = [command.text for command in script.commands if command.name == "license"]
        requires = commands.get("requires")
        return cls(
            source=texts["from"],
            template=texts.get("template"),
            system=texts.get("system"),
            licenses=_licenses(licenses),
            parameters=_parameters(script.commands, what),
            parser=texts.get("parser"),
            renderer=texts.get("renderer"),
            requires=_checked(requires, what, check_requires) if requires else None,
            draft=texts.get("draft") or None,
            messages=tuple(_messages(script.commands, what)),
            notes=tuple(_notes(script.commands, script.dropped, what)),
        )

    def with_options(
        self,
        *,
        template: str | None = None,
        system: str | None = None,
        licenses: Sequence[str] = (),
        parameters: Mapping[str, ParameterValue] | None = None,
        parser: str | None = None,
        renderer: str | None = None,
        requires: str | None = None,
    ) -> Modelfile:
        """Return the Modelfile with options in place of its own texts and parameters.

        Licences are added after its own. A parameter of an option replaces the Modelfile's, all
        its stop texts too. "" removes a text. Raises: UsageError for a text that UTF-8 can't
        encode and an invalid version; LimitExceededError over 4 MiB.
        """
        named = {"template": template, "system": system, "parser": parser, "renderer": renderer}
        for name, text in (*named.items(), *(("license", text) for text in licenses)):
            _check_text(name, text or "")
        changed: dict[str, Any] = {name: text for name, text in named.items() if text is not None}
        if requires is not None:
            changed["requires"] = check_requires(requires)
        return replace(
            self,
            licenses=_licenses((*self.licenses, *licenses)),
            parameters={**self.parameters, **(parameters or {})},
            **changed,
        )

    def layers(self) -> tuple[tuple[str, bytes], ...]:
        """Return the layers that follow a manifest's JSON layers: media types and bytes.

        In Ollama's order: template, system text, a layer for each licence, parameters, messages;
        empty ones are left out. Texts are stored unchanged; parameters and messages are a line of
        JSON and a newline. Several licences, and messages: ollama/ollama@1d7605bf
        x/create/manifest.go `ApplyModelfileLayers`.
        """
        messages = [{"role": role, "content": content} for role, content in self.messages]
        layers = (
            (TEMPLATE_MEDIA_TYPE, (self.template or "").encode()),
            (SYSTEM_MEDIA_TYPE, (self.system or "").encode()),
            *((LICENSE_MEDIA_TYPE, text.encode()) for text in self.licenses),
            (PARAMS_MEDIA_TYPE, self.parameters and encode_parameters(self.parameters)),
            (MESSAGES_MEDIA_TYPE, messages and strictjson.encode(messages) + b"\n"),
        )
        return tuple((media_type, data) for media_type, data in layers if data)

    def configure(self, config: ModelConfig) -> ModelConfig:
        """Return the config blob with this parser, renderer and version for the architecture's.

        "" keeps the architecture's, as in Ollama (`resolveParserName`). The caller sets the
        capabilities: Ollama asks the resulting parser for its tools and thinking.
        """
        return replace(
            config,
            parser=self.parser or config.parser,
            renderer=self.renderer or config.renderer,
            requires=self.requires or config.requires,
        )


def check_requires(text: str) -> str:
    """Return the version of Ollama that a model requires, without a leading ``v``.

    ``MAJOR[.MINOR[.PATCH[-PRERELEASE][+BUILD]]]`` as golang.org/x/mod/semver reads it, and at least
    0.19.0, which every model of safetensors needs; 0.19.0-rc1 is below it. Source: Ollama's
    `ConfigFromModelfile` of 2026, which refuses the same (later versions raise it to 0.19.0, or
    accept it). Raises: UsageError.
    """
    version = text.removeprefix("v")
    match = _VERSION.fullmatch(version) if len(version) <= _MAX_VERSION else None
    if match is None:
        raise UsageError(
            f"{quoted(text)} is not a version of Ollama", hint=f"Write it as {REQUIRED_OLLAMA}."
        )
    numbers = [int(part or 0) for part in match.group(1, 2, 3)]
    # A version with a prerelease comes before the one without.
    least = [int(part) for part in REQUIRED_OLLAMA.split(".")]
    if (*numbers, match["pre"] is None) < (*least, True):
        raise UsageError(
            f"{version} is below {REQUIRED_OLLAMA}, the first Ollama that reads such models"
        )
    return version


def resolve_path(text: str, folder: Path, home: Path) -> str:
    """Return the path that FROM or DRAFT means in a Modelfile of ``folder``; ``~`` is ``home``.

    Source: ollama/ollama@00dc3af8 parser/parser.go `expandPath`. Ollama then tries the current
    folder and the models of its store; this does not. Raises: UsageError for NUL and for another
    user's ``~name``.
    """
    if "\0" in text:
        raise UsageError(f"{quoted(text)} is not a path")
    if text == "~" or text.startswith("~/"):
        return str(home / text[1:].lstrip("/"))
    if text.startswith("~"):
        raise UsageError(
            f"{quoted(text)}: the folder of another user is not looked up",
            hint="Write the whole path.",
        )
    return text if "://" in text else str(folder / text)


def _check_sources(commands: Iterable[Command], what: str) -> None:
    seen: dict[str, int] = {}
    for command in commands:
        if command.name == "adapter":
            raise UnsupportedSourceError(
                f"{what}: line {command.line}: ADAPTER: adapters can't be imported beside "
                "safetensors weights",
                rule=RULE,
                hint="Merge the adapter into the weights first.",
            )
        if command.name in _ONCE and command.name in seen:
            message = f"a second {command.name.upper()}; the first is in line {seen[command.name]}"
            raise error_at(what, command.line, message)
        seen.setdefault(command.name, command.line)


def _licenses(texts: Iterable[str]) -> tuple[str, ...]:
    licenses = tuple(text for text in texts if text)
    strictjson.check_limit("the model", len(licenses), "licenses", MAX_LICENSES, RULE)
    return licenses


def _parameters(commands: Iterable[Command], what: str) -> dict[str, ParameterValue]:
    parameters: dict[str, ParameterValue] = {}
    for command in commands:
        if command.name == "parameter" and command.key not in DEPRECATED:
            _checked(command, what, partial(add_parameter, parameters, command.key))
    return parameters


def _checked(command: Command, what: str, parse: Callable[[str], _T]) -> _T:
    try:
        return parse(command.text)
    except UsageError as error:
        message = f"{command.name.upper()}: {error.message}"
        raise error_at(what, command.line, message, error.hint) from None


def _messages(commands: Iterable[Command], what: str) -> Iterator[tuple[str, str]]:
    for command in commands:
        if command.name == "message":
            if command.key not in ROLES:
                message = f"MESSAGE: unknown role {quoted(command.key)}"
                hint = f"Use one of: {', '.join(ROLES)}."
                raise error_at(what, command.line, message, hint)
            yield command.key, command.text


def _notes(commands: Iterable[Command], dropped: int, what: str) -> Iterator[str]:
    lines = {command.key: command.line for command in commands if command.name == "parameter"}
    for key in sorted(lines.keys() & DEPRECATED):
        yield f"{what}: line {lines[key]}: {key} has no effect in Ollama any more and was left out"
    if dropped:
        yield f"{what}: {dropped:,} characters that do not print were left out of its texts"


def _check_text(name: str, text: str) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise UsageError(f"the {name} can't be encoded in UTF-8") from None
    strictjson.check_limit(f"the {name}", size, "bytes", MAX_MODELFILE, RULE)
