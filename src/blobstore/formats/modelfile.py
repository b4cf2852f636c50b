"""Modelfile: the texts and settings that go beside a model's weights, from a Modelfile or from options. Pure.

Source: ollama/ollama@0265d512 x/create/client/create.go `ConfigFromModelfile`, `newManifestWriter`,
`resolveParserName` and `createModelfileLayers`, unless a function says otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from blobstore.errors import (
    LimitExceededError,
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
    """What a Modelfile says. A field that it does not set is None or empty; "" is set, to nothing.

    ``source`` and ``draft`` are paths as written (`resolve_path`), ``messages`` pairs of role and
    text, ``notes`` sentences about what Ollama leaves out of such a file and we do too.
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

        Of a command that is there more than once the last counts, but licences, stop texts and
        messages are all kept (Ollama's import of safetensors keeps the last licence and no
        message).

        Raises: as `read_script`; DocumentError (rule T1) with the line and the command for a
        missing or second FROM, a second DRAFT, an unknown parameter or role, a value of the wrong
        type, an invalid version; UnsupportedSourceError for ADAPTER; LimitExceededError over 1000
        licences.
        """
        script = read_script(raw, what)
        commands = {command.name: command for command in script.commands}
        _check_sources(script.commands, what)
        if "from" not in commands:
            raise error_at(
                what,
                1,
                "there is no FROM command",
                "Begin with FROM and the folder of the checkpoint.",
            )
        texts = {name: command.text for name, command in commands.items()}
        requires = commands.get("requires")
        return cls(
            source=texts["from"],
            template=texts.get("template"),
            system=texts.get("system"),
            licenses=_licenses(
                command.text for command in script.commands if command.name == "license"
            ),
            parameters=_parameters(script.commands, what),
            parser=texts.get("parser"),
            renderer=texts.get("renderer"),
            requires=_requires(requires, what) if requires else None,
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
        """Return the Modelfile with what options say in place of what it says.

        Licences are added, after its own.

        A parameter of an option replaces the Modelfile's, all its stop texts too. "" removes a
        text. Raises: UsageError for a text that UTF-8 can't hold and an invalid version;
        LimitExceededError over 4 MiB.
        """
        named = {"template": template, "system": system, "parser": parser, "renderer": renderer}
        for name, text in (*named.items(), *(("license", text) for text in licenses)):
            _check_text(name, text or "")
        return replace(
            self,
            template=_either(template, self.template),
            system=_either(system, self.system),
            licenses=_licenses((*self.licenses, *licenses)),
            parameters={**self.parameters, **(parameters or {})},
            parser=_either(parser, self.parser),
            renderer=_either(renderer, self.renderer),
            requires=self.requires if requires is None else check_requires(requires),
        )

    def layers(self) -> tuple[tuple[str, bytes], ...]:
        """Return the layers that follow a manifest's JSON layers: media type and bytes, in Ollama's order; no names.

        Template, system text, one a licence, parameters, messages: each only when there is
        something in it. Texts are stored as they are; parameters and messages are one line of JSON
        and a newline. Several licences, and messages: ollama/ollama@1d7605bf x/create/manifest.go
        `ApplyModelfileLayers`.
        """
        return tuple(self._layers())

    def _layers(self) -> Iterator[tuple[str, bytes]]:
        if self.template:
            yield TEMPLATE_MEDIA_TYPE, self.template.encode()
        if self.system:
            yield SYSTEM_MEDIA_TYPE, self.system.encode()
        for text in self.licenses:
            yield LICENSE_MEDIA_TYPE, text.encode()
        if self.parameters:
            yield PARAMS_MEDIA_TYPE, encode_parameters(self.parameters)
        if self.messages:
            messages = [{"role": role, "content": content} for role, content in self.messages]
            yield MESSAGES_MEDIA_TYPE, strictjson.encode(messages) + b"\n"

    def configure(self, config: ModelConfig) -> ModelConfig:
        """Return the config blob with the parser, renderer and version that are set here instead of the architecture's.

        "" keeps the architecture's, as in Ollama (`resolveParserName`). Capabilities are the
        caller's: Ollama asks the parser that is left after this for its tools and thinking.
        """
        chosen = {"parser": self.parser, "renderer": self.renderer, "requires": self.requires}
        return config.model_copy(update={name: text for name, text in chosen.items() if text})


def check_requires(text: str) -> str:
    """Return the version of Ollama that a model requires, without a leading ``v``.

    ``MAJOR[.MINOR[.PATCH[-PRERELEASE][+BUILD]]]`` as golang.org/x/mod/semver reads it, and not
    under the 0.19.0 that any model of safetensors needs; 0.19.0-rc1 is under it. Source: Ollama's
    `ConfigFromModelfile` of 2026, which refuses the same (later versions raise it to 0.19.0, or
    take it). Raises: UsageError.
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
            f"{version} is under {REQUIRED_OLLAMA}, the first version of Ollama that reads such models"
        )
    return version


def resolve_path(text: str, folder: Path, home: Path) -> Path:
    """Return the path that FROM or DRAFT means in a Modelfile of ``folder``; ``~`` is ``home``.

    Source: ollama/ollama@00dc3af8 parser/parser.go `expandPath`. Nothing is looked up, where Ollama
    then tries the current folder and the models of its store. Raises: UsageError for NUL and for
    another user's ``~name``.
    """
    if "\0" in text:
        raise UsageError(f"{quoted(text)} is not a path")
    if text == "~" or text.startswith("~/"):
        return home / text[1:].lstrip("/")
    if text.startswith("~"):
        raise UsageError(
            f"{quoted(text)}: the folder of another user is not looked up",
            hint="Write the whole path.",
        )
    return (
        Path(text) if "://" in text else folder / text
    )  # an address, which is refused by that name


def _either(given: str | None, otherwise: str | None) -> str | None:
    return otherwise if given is None else given


def _check_sources(commands: Iterable[Command], what: str) -> None:
    seen: dict[str, int] = {}
    for command in commands:
        if command.name == "adapter":
            message = f"{what}: line {command.line}: ADAPTER: adapters can't be imported beside safetensors weights"
            raise UnsupportedSourceError(
                message, rule=RULE, hint="Merge the adapter into the weights first."
            )
        if command.name in _ONCE and command.name in seen:
            name = command.name.upper()
            raise error_at(
                what, command.line, f"{name} is there twice, first in line {seen[command.name]}"
            )
        seen.setdefault(command.name, command.line)


def _licenses(texts: Iterable[str]) -> tuple[str, ...]:
    licenses = tuple(text for text in texts if text)
    if len(licenses) > MAX_LICENSES:
        raise LimitExceededError(
            f"limit exceeded: {len(licenses):,} licenses, at most {MAX_LICENSES:,}", rule=RULE
        )
    return licenses


def _parameters(commands: Iterable[Command], what: str) -> dict[str, ParameterValue]:
    parameters: dict[str, ParameterValue] = {}
    for command in commands:
        if command.name == "parameter" and command.key not in DEPRECATED:
            try:
                add_parameter(parameters, command.key, command.text)
            except UsageError as error:
                raise error_at(
                    what, command.line, f"PARAMETER: {error.message}", error.hint
                ) from None
    return parameters


def _requires(command: Command, what: str) -> str:
    try:
        return check_requires(command.text)
    except UsageError as error:
        raise error_at(what, command.line, f"REQUIRES: {error.message}", error.hint) from None


def _messages(commands: Iterable[Command], what: str) -> Iterator[tuple[str, str]]:
    for command in commands:
        if command.name == "message":
            if command.key not in ROLES:
                hint = f"Use one of: {', '.join(ROLES)}."
                raise error_at(
                    what, command.line, f"MESSAGE: unknown role {quoted(command.key)}", hint
                )
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
    if size > MAX_MODELFILE:
        raise LimitExceededError(
            f"limit exceeded: the {name} has {size:,} bytes, at most {MAX_MODELFILE:,}", rule=RULE
        )
