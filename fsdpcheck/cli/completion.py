"""``fsdpcheck completion SHELL``: what makes it complete commands, options and the names that they take."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Final, get_args

from fsdpcheck import adapters
from fsdpcheck.case import Trait
from fsdpcheck.case.profiles import PROFILES
from fsdpcheck.engines._common import metal
from fsdpcheck.errors import HOLDS

_EPILOG: Final = """examples, once for each release:
  fsdpcheck completion bash > ~/.local/share/bash-completion/completions/fsdpcheck
  fsdpcheck completion fish > ~/.config/fish/completions/fsdpcheck.fish
  fsdpcheck completion zsh > ~/.fsdpcheck.zsh    and in ~/.zshrc, below compinit: source ~/.fsdpcheck.zsh
"""
_ZSH: Final = "autoload -U +X bashcompinit && bashcompinit\n"
"""By which zsh takes completions of bash."""
_HEAD: Final = """# completion of fsdpcheck, written by `fsdpcheck completion`
_fsdpcheck() {
    local current=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} words=
    local command=${COMP_WORDS[1]}
    [[ $command == trace && $COMP_CWORD -gt 2 ]] && command="trace ${COMP_WORDS[2]}"
    if [[ $COMP_CWORD -eq 1 ]]; then
        words="%s"
    else
        case "$command $before" in
"""
_MIDDLE: Final = """        esac
        [[ -z $words ]] && case $command in
"""
_TAIL: Final = """        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}
complete -o default -F _fsdpcheck fsdpcheck
"""
_LISTS: Final = "adapters laws promises faults engines traits"
_ENGINES: Final = ("simulated", "processes")


def add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], parser: Callable[[], argparse.ArgumentParser]
) -> None:
    """Add the command to a parser; ``parser`` makes the one that is completed."""
    completion = commands.add_parser(
        "completion",
        help="completion for a shell",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    completion.set_defaults(command=partial(_completion, parser))
    completion.add_argument(
        "shell", choices=tuple(_SHELLS), metavar="SHELL", help="bash, zsh or fish, whose completion is printed"
    )


def _completion(parser: Callable[[], argparse.ArgumentParser], options: argparse.Namespace) -> int:
    print(_SHELLS[options.shell](parser()), end="")
    return HOLDS


def _bash(parser: argparse.ArgumentParser) -> str:
    """The completion of bash, with the names that there are in this release."""
    found, values = dict(_commands("", parser)), _values()
    top = _top(found)
    lines = [_HEAD % " ".join(top)]
    for name, own in found.items():
        for option in (option for action in own._actions for option in action.option_strings):
            if option in values:
                lines.append(f'            {shlex.quote(f"{name} {option}")}) words="{" ".join(values[option])}";;\n')
    nested = [name for name in top if name not in found]
    lines += [f'            "{one} {one}") words="{" ".join(_below(one, found))}";;\n' for one in nested]
    lines.append(f'            "list list") words="{_LISTS}";;\n')
    lines.append(_MIDDLE)
    for name, own in found.items():
        words = " ".join(option for action in own._actions for option in action.option_strings)
        lines.append(f'            {shlex.quote(name)}) words="{words}";;\n')
    return "".join([*lines, _TAIL])


def _zsh(parser: argparse.ArgumentParser) -> str:
    return _ZSH + _bash(parser)


def _fish(parser: argparse.ArgumentParser) -> str:
    found, values = dict(_commands("", parser)), _values()
    top, begin = _top(found), "complete -c fsdpcheck"
    lines = [f"{begin} -f -n __fish_use_subcommand -a '{' '.join(top)}'"]
    for one in (one for one in top if one not in found):
        below = " ".join(_below(one, found))
        seen = f"__fish_seen_subcommand_from {one}; and not __fish_seen_subcommand_from {below}"
        lines.append(f"{begin} -f -n '{seen}' -a '{below}'")
    lines.append(f"{begin} -f -n '__fish_seen_subcommand_from list' -a '{_LISTS}'")
    for name, own in found.items():
        seen = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in name.split())
        for option in (option for action in own._actions for option in action.option_strings):
            kind = f"-l {option[2:]}" if option.startswith("--") else f"-s {option[1:]}"
            offered = " ".join(values.get(option, ())).replace("*", "\\*")  # fish would look for such files
            names = f" -x -a '{offered}'" if offered else ""
            lines.append(f"{begin} -n '{seen}' {kind}{names}")
    return "\n".join([*lines, ""])


_SHELLS: Final = {"bash": _bash, "zsh": _zsh, "fish": _fish}


def _top(found: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(name.partition(" ")[0] for name in found))


def _commands(name: str, parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    own = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if name and not own:
        yield name, parser
    for action in own:
        for word, one in action.choices.items():
            yield from _commands(f"{name} {word}".strip(), one)


def _below(name: str, found: dict[str, argparse.ArgumentParser]) -> list[str]:
    return [one.removeprefix(f"{name} ") for one in found if one.startswith(f"{name} ")]


def _values() -> dict[str, tuple[str, ...]]:
    """By option the names that it takes. Imports torch, for the laws."""
    from fsdpcheck.findings import faults
    from fsdpcheck.judging import registry

    laws = registry.chapters()
    chapters = dict.fromkeys(f"{name.partition('.')[0]}.*" for name in laws)
    named = (*chapters, *laws)
    return {
        "--adapter": adapters.names(), "--law": named, "--avoid": get_args(Trait), "--profile": tuple(PROFILES),
        "--engine": _ENGINES, "--device": get_args(metal.Device), "--backend": ("gloo", "nccl"),
        "--install": tuple(faults.faults()),
    }  # fmt: skip
