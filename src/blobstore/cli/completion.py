"""``completion``: scripts for bash, zsh and fish, and the answers that they ask for.

A script runs ``blobstore complete`` with the words of the command line, the last of which is to be
completed. Each line of the answer is a word, a tab and what it means; the line ``:files`` says that
names of files fit too. What fits follows from the metavars of the commands: NAME is a stored model,
TYPE a type, ``minmax|search`` one of the two.
"""

import re
import shlex
from collections.abc import Callable, Iterator, Sequence
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
    given = words if line is None else words_of(line)[1:]
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


def answers_for(
    root: Any, words: Sequence[str], models: Callable[[str | None], list[str]]
) -> list[Answer]:
    """Return the completions of the last of the ``words``; ``models`` lists those of a store."""
    *before, current = words
    command, start, stored_in = root, "", None
    while name := next((word for word in before if word in getattr(command, "commands", ())), None):
        place = before.index(name)
        stored_in = stored_in or _context(command, before[:place]).params.get("store")
        command, before = command.get_command(None, name), before[place + 1 :]
    if current.startswith("-") and "--" not in before:
        name, equals, current = current.partition("=")
        if not equals:
            return _matches(name, _described_options(command))
        before, start = [*before, name], f"{name}="
    context = _context(command, before)
    metavar = _metavar(context, None if "--" in before else before[-1:], only_option=bool(start))
    if not (metavar or start) and hasattr(command, "commands"):
        return _matches(current, _described_commands(command))
    kinds = frozenset(metavar.split("|"))
    fitting = _words(metavar, kinds, lambda: models(context.params.get("store") or stored_in))
    answers: list[Answer] = [(start + word, "") for word in fitting if word.startswith(current)]
    return [*answers, FILES] if kinds & _PATHS else answers


def _context(command: Any, words: Sequence[str]) -> Any:
    return command.make_context(  # a command keeps the names of help of its first context
        None, list(words), resilient_parsing=True, help_option_names=["-h", "--help"]
    )


def _metavar(context: Any, last: list[str] | None, *, only_option: bool) -> str:
    """Return what fits here: of the option without a value, else of the argument."""
    options = _parameters(context.command, "option")
    waiting = [one for one in options if not one.is_flag and last and last[0] in one.opts]
    left = [
        one
        for one in _parameters(context.command, "argument")
        if one.nargs < 0 or context.get_parameter_source(one.name).name != "COMMANDLINE"
    ]
    fitting = [*waiting, *([] if only_option else left)]
    return (fitting[0].metavar or "") if fitting else ""


def _words(metavar: str, kinds: frozenset[str], models: Callable[[], list[str]]) -> list[str]:
    if metavar == "TYPE":
        from blobstore.formats.dtypes import QuantType

        return [kind.value for kind in QuantType]
    if kinds & _MODELS:
        return models()
    return metavar.split("|") if _CHOICES.fullmatch(metavar) else []


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


def _stored_models(store: str | None) -> list[str]:
    try:
        return [str(name) for name in store_at(store).manifests.names()]
    except BlobStoreError:
        return []
