"""``completion``: scripts for bash, zsh and fish, and the answers that they ask for.

A script runs ``blobstore complete`` with the words of the command line, the last of which is to be
completed. Each line of the answer is a word, a tab and what it means; the line ``:files`` says that
names of files fit too. What fits follows from the metavars of the commands: NAME is a stored model,
TYPE a type, ``minmax|search`` one of the two.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from blobstore.cli.output import emit, printable
from blobstore.cli.stores import store_at
from blobstore.errors import BlobStoreError, UsageError

_FILES = ":files"
_LONGEST_MEANING = 80
_CHOICES = re.compile(r"[a-z0-9-]+(?:\|[a-z0-9-]+)+")
_MODELS = frozenset(("NAME", "A", "B", "TARGET", "MODEL"))
_PATHS = frozenset(("SOURCE", "FILE", "DIR", "TARGET"))
Answer = tuple[str, str]
"""A word, and what it means."""
_BASH = r"""_blobstore() {
    local line="${COMP_LINE:0:COMP_POINT}" word meaning files=
    # Readline replaces only the part after the last : or =, so the part before it is left out.
    local done="${line##*[[:space:]]}"
    done="${done%"${done##*[:=]}"}"
    COMPREPLY=()
    while IFS=$'\t' read -r word meaning; do
        if [[ $word == :files ]]; then files=1; else COMPREPLY+=("${word#"$done"}"); fi
    done < <("$1" complete --line "$line" 2>/dev/null)
    [[ -n $files ]] || compopt +o default 2>/dev/null
}
complete -o default -F _blobstore blobstore"""


_ZSH = r"""#compdef blobstore
_blobstore() {
    local -a found
    local line files word meaning
    for line in "${(@f)$("${(Q)words[1]}" complete -- "${(@Q)words[2,CURRENT]}" 2>/dev/null)}"; do
        if [[ $line == :files ]]; then files=1; continue; fi
        [[ -n $line ]] || continue
        word="${${line%%$'\t'*}//:/\\:}"
        meaning="${line#*$'\t'}"
        found+=("$word${meaning:+:$meaning}")
    done
    (( $#found )) && _describe blobstore found
    [[ -n $files ]] && _files
}
if [[ $funcstack[1] == _blobstore ]]; then _blobstore "$@"; else compdef _blobstore blobstore; fi"""


_FISH = r"""function __blobstore_complete
    set -l words (commandline -opc)
    set -l current (commandline -ct)
    for line in ($words[1] complete -- $words[2..-1] "$current" 2>/dev/null)
        if test "$line" = :files
            __fish_complete_path "$current"
        else
            printf '%s\n' $line
        end
    end
end
complete --command blobstore --no-files --arguments '(__blobstore_complete)'"""


_SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}


def completion(
    shell: Annotated[
        str, typer.Argument(metavar="bash|zsh|fish", help="The shell that is to read it.")
    ],
) -> None:
    """Print a shell's completion script. Use it as in: source <(blobstore completion bash)."""
    if shell not in _SCRIPTS:
        raise UsageError(f"no completion for {shell!r}", hint=f"Use one of: {', '.join(_SCRIPTS)}.")
    emit(_SCRIPTS[shell])


def complete(
    context: typer.Context,
    words: Annotated[
        list[str] | None, typer.Argument(metavar="WORD", help="The words after the command.")
    ] = None,
    line: Annotated[
        str | None,
        typer.Option("--line", metavar="TEXT", help="Instead of words, the line up to here."),
    ] = None,
) -> None:
    """Print what the last word may be: for the scripts of `completion`."""
    given = words_of(line)[1:] if line is not None else words or []
    answers = answers_for(context.find_root().command, given or [""], _stored_models)
    for word, meaning in answers.words:
        emit(f"{printable(word)}\t{printable(meaning)}")
    if answers.files:
        emit(_FILES)


def words_of(line: str) -> list[str]:
    """Return the words of a command line; the last one is unfinished, or empty after a space."""
    for end in ("", "'", '"'):
        try:
            words = shlex.split(line + end)
        except ValueError:
            continue
        return [*words, ""] if not end and line[-1:].isspace() else words
    return line.split(" ")


@dataclass(frozen=True, slots=True)
class Answers:
    """What a word may be: one of ``words``, or the name of a file if ``files`` says so."""

    words: tuple[Answer, ...] = ()
    files: bool = False


@dataclass(slots=True)
class _Position:
    """A position in a command line: the command, its arguments, the option without a value."""

    command: Any
    arguments: int = 0
    option: Any = None
    ended: bool = False
    """After ``--``: whatever comes is an argument."""
    store: str | None = None

    def step(self, word: str) -> None:
        """Take a finished word."""
        if self.option is not None:
            self._take(self.option, word)
            self.option = None
        elif word == "--" and not self.ended:
            self.ended = True
        elif self.is_option(word):
            name, equals, value = word.partition("=")
            option = self.option_named(name)
            if equals:
                self._take(option, value)
            elif option is not None and not option.is_flag:
                self.option = option
        elif _commands(self.command):
            self.command = _commands(self.command).get(word)
        else:
            self.arguments += 1

    def is_option(self, word: str) -> bool:
        """Return True for a word that is an option, or the beginning of one."""
        return word.startswith("-") and not self.ended

    def option_named(self, name: str) -> Any:
        """Return the command's option of that name; None if it has no such option."""
        return next(
            (option for option in _parameters(self.command, "option") if name in option.opts), None
        )

    def _take(self, option: Any, value: str) -> None:
        if option is not None and "--store" in option.opts:
            self.store = value

    @property
    def metavar(self) -> str:
        """What is said to be expected here: of the option that waits, else of the argument.

        Empty when nothing is.
        """
        if self.option is not None:
            return self.option.metavar or ""
        arguments = _parameters(self.command, "argument")
        if self.arguments < len(arguments):
            return arguments[self.arguments].metavar or ""
        return arguments[-1].metavar or "" if arguments and arguments[-1].nargs < 0 else ""


def answers_for(
    root: Any, words: Sequence[str], models: Callable[[str | None], list[str]]
) -> Answers:
    """Return the completions of the last of the ``words``; ``models`` lists those of a store."""
    *before, current = words
    position = _Position(root)
    for word in before:
        position.step(word)
    if position.option is None and position.is_option(current):
        name, equals, value = current.partition("=")
        if not equals:
            return Answers(_beginning(current, _described_options(position.command)))
        position.option = position.option_named(name)
        found = _values(position, value, models) if position.option is not None else Answers()
        return Answers(
            tuple((f"{name}={word}", meaning) for word, meaning in found.words), found.files
        )
    if position.option is None and _commands(position.command):
        return Answers(_beginning(current, _described_commands(position.command)))
    return _values(position, current, models)


def _values(
    position: _Position, current: str, models: Callable[[str | None], list[str]]
) -> Answers:
    metavar = position.metavar
    kinds = frozenset(metavar.split("|"))
    words: list[str] = metavar.split("|") if _CHOICES.fullmatch(metavar) else []
    if metavar == "TYPE":
        from blobstore.formats.quant import QuantType

        words = [kind.value for kind in QuantType]
    elif kinds & _MODELS:
        words = models(position.store)
    return Answers(_beginning(current, ((word, "") for word in words)), bool(kinds & _PATHS))


def _beginning(current: str, answers: Iterator[Answer]) -> tuple[Answer, ...]:
    return tuple(answer for answer in answers if answer[0].startswith(current))


def _described_options(command: Any) -> Iterator[Answer]:
    for option in _parameters(command, "option"):
        if not option.hidden:
            yield option.opts[-1], (option.help or "")[:_LONGEST_MEANING]
    yield "--help", "Show how a command is used."


def _described_commands(group: Any) -> Iterator[Answer]:
    for name, command in _commands(group).items():
        if not command.hidden:
            yield name, command.get_short_help_str(_LONGEST_MEANING)


def _parameters(command: Any, kind: str) -> list[Any]:
    return [one for one in getattr(command, "params", []) if one.param_type_name == kind]


def _commands(command: Any) -> dict[str, Any]:
    return getattr(command, "commands", {})


def _stored_models(store: str | None) -> list[str]:
    try:
        return [str(name) for name in store_at(store).manifests.names()]
    except BlobStoreError:
        return []
