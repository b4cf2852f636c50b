"""``completion``: scripts for bash, zsh and fish, and the answers that they ask for.

A script runs ``blobstore complete`` with the words of the command line, the last of which is to be
completed. Each line of the answer is a word, a tab and what it means; the line ``:files`` says that
names of files fit too. What fits follows from the metavars of the commands: NAME is a stored model,
TYPE a type, ``minmax|search`` one of the two.
"""

import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from typer import Argument, Option

from blobstore.cli.output import emit, printable
from blobstore.cli.stores import store_at
from blobstore.errors import BlobStoreError, UsageError

Answer = tuple[str, ...]
"""A word, and what it means."""
FILES: Answer = (":files",)
"""The answer that names of files fit, too."""
_LONGEST_MEANING = 80
_CHOICES = re.compile(r"[a-z0-9-]+(?:\|[a-z0-9-]+)+")
_MODELS = frozenset(("NAME", "A", "B", "TARGET", "MODEL"))
_PATHS = frozenset(("SOURCE", "FILE", "DIR", "TARGET"))
_SCRIPTS = {
    "bash": r"""_blobstore() {
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
complete -o default -F _blobstore blobstore""",
    "zsh": r"""#compdef blobstore
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
if [[ $funcstack[1] == _blobstore ]]; then
    _blobstore "$@"
else
    compdef _blobstore blobstore
fi""",
    "fish": r"""function __blobstore_complete
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
complete --command blobstore --no-files --arguments '(__blobstore_complete)'""",
}


def completion(
    shell: Annotated[
        str, Argument(metavar="bash|zsh|fish", help="Shell to generate the script for.")
    ],
) -> None:
    """Print a shell's completion script. Use it as in: source <(blobstore completion bash)."""
    if shell not in _SCRIPTS:
        raise UsageError(f"no completion for {shell!r}", hint=f"Use one of: {', '.join(_SCRIPTS)}.")
    emit(_SCRIPTS[shell])


def complete(
    context: typer.Context,
    words: Annotated[
        list[str] | None, Argument(metavar="WORD", help="The words after the command.")
    ] = None,
    line: Annotated[
        str | None,
        Option(metavar="TEXT", help="Instead of words, the line up to here."),
    ] = None,
) -> None:
    """Print what the last word may be: for the scripts of `completion`."""
    given = words_of(line)[1:] if line is not None else words or []
    for answer in answers_for(context.find_root().command, given or [""], _stored_models):
        emit("\t".join(map(printable, answer)))


def words_of(line: str) -> list[str]:
    """Return the words of a command line; the last one is unfinished, or empty after a space."""
    for end in ("", "'", '"'):
        try:
            words = shlex.split(line + end)
        except ValueError:
            continue
        return [*words, ""] if not end and line[-1:].isspace() else words
    return line.split(" ")


@dataclass(slots=True)
class _Position:
    """A position in a command line: the command, its arguments, the option without a value."""

    command: Any
    arguments: int = 0
    option: Any = None
    ended: bool = False
    """After ``--``: all that follows is an argument."""
    store: str | None = None

    def step(self, word: str) -> None:
        """Take a finished word."""
        if self.option is not None:
            if self.option.name == "store":
                self.store = word
            self.option = None
        elif not self.is_option(word):
            if _is_group(self.command):
                self.command = self.command.get_command(None, word)
            else:
                self.arguments += 1
        elif word == "--":
            self.ended = True
        else:
            name, equals, value = word.partition("=")
            options = _parameters(self.command, "option")
            self.option = next((o for o in options if name in o.opts and not o.is_flag), None)
            if equals and self.option is not None:
                self.step(value)

    def is_option(self, word: str) -> bool:
        """Return True for a word that is an option, or the beginning of one."""
        return self.option is None and word.startswith("-") and not self.ended

    @property
    def metavar(self) -> str:
        """What fits here: of the option without a value, else of the argument; empty if nothing."""
        arguments = _parameters(self.command, "argument")
        left = arguments[self.arguments :] or [one for one in arguments[-1:] if one.nargs < 0]
        parameters = [self.option] if self.option is not None else left
        return (parameters[0].metavar or "") if parameters else ""


def answers_for(
    root: Any, words: Sequence[str], models: Callable[[str | None], list[str]]
) -> list[Answer]:
    """Return the completions of the last of the ``words``; ``models`` lists those of a store."""
    *before, current = words
    position, start = _Position(root), ""
    for word in before:
        position.step(word)
    if position.is_option(current):
        name, equals, current = current.partition("=")
        if not equals:
            return _matches(name, _described_options(position.command))
        position.step(name)
        if position.option is None:
            return []
        start = f"{name}="
    elif position.option is None and _is_group(position.command):
        return _matches(current, _described_commands(position.command))
    kinds = frozenset(position.metavar.split("|"))
    words_here = _words(position, models, kinds)
    answers: list[Answer] = [(start + word, "") for word in words_here if word.startswith(current)]
    return [*answers, FILES] if kinds & _PATHS else answers


def _words(
    position: _Position, models: Callable[[str | None], list[str]], kinds: frozenset[str]
) -> list[str]:
    if position.metavar == "TYPE":
        from blobstore.formats.dtypes import QuantType

        return [kind.value for kind in QuantType]
    if kinds & _MODELS:
        return models(position.store)
    return position.metavar.split("|") if _CHOICES.fullmatch(position.metavar) else []


def _matches(current: str, answers: Iterator[Answer]) -> list[Answer]:
    return [answer for answer in answers if answer[0].startswith(current)]


def _described_options(command: Any) -> Iterator[Answer]:
    for option in _parameters(command, "option"):
        if not option.hidden:
            yield option.opts[-1], (option.help or "")[:_LONGEST_MEANING]
    yield "--help", "Show how a command is used."


def _described_commands(group: Any) -> Iterator[Answer]:
    for name in group.list_commands(None):
        command = group.get_command(None, name)
        if not command.hidden:
            yield name, command.get_short_help_str(_LONGEST_MEANING)


def _parameters(command: Any, kind: str) -> list[Any]:
    return [one for one in getattr(command, "params", []) if one.param_type_name == kind]


def _is_group(command: Any) -> bool:
    return hasattr(command, "commands")


def _stored_models(store: str | None) -> list[str]:
    try:
        return [str(name) for name in store_at(store).manifests.names()]
    except BlobStoreError:
        return []
