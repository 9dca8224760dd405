"""The verb `completion`: lockstep completion bash | zsh | fish."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

from lockstep.cli.arguments import Parser
from lockstep.core.terminal import echo

_EPILOG = """\
  bash  echo 'source <(lockstep completion bash)' >> ~/.bashrc
  zsh   echo 'source <(lockstep completion zsh)' >> ~/.zshrc        after compinit
  fish  lockstep completion fish > ~/.config/fish/completions/lockstep.fish
The script calls the Python that printed it: print it again after moving that."""


def run(arguments: Sequence[str]) -> int:
    """Print the script."""
    parser = Parser(
        "completion", "Prints a shell's completion script for verbs, flags, recipes and config keys.", _EPILOG
    )
    parser.add_argument("shell", choices=tuple(_SCRIPTS), metavar="SHELL", help="bash, zsh or fish")
    args = parser.parse_args(arguments)
    echo(_SCRIPTS[args.shell].replace("PYTHON", shlex.quote(sys.executable)).strip())
    return 0


# Words are passed as arguments, and the reply is only compared, sliced and offered: no eval, no compgen -W.

_BASH = r"""
# Completes lockstep in bash.
_lockstep() {
    local typed=() word raw=${COMP_WORDS[COMP_CWORD]} index joined=0
    for ((index = 1; index <= COMP_CWORD; index++)); do
        word=${COMP_WORDS[index]}
        if [[ $word == [=:@]* && ${#typed[@]} -gt 0 ]] || [[ $joined == 1 && -n $word ]]; then
            typed[${#typed[@]}-1]+=$word
        else
            typed+=("$word")
        fi
        [[ $word == *[=:@] ]] && joined=1 || joined=0
    done
    [[ $raw == [=:@] ]] && raw=
    local current=${typed[${#typed[@]}-1]} kind candidate partial=1
    local prefix=${current%"$raw"}
    COMPREPLY=()
    {
        IFS= read -r kind
        while IFS=$'\t' read -r candidate _; do
            COMPREPLY+=("${candidate#"$prefix"}")
            [[ $candidate == *[=.] ]] || partial=0
        done
    } < <(PYTHON -P -m lockstep.cli.complete bash "${typed[@]}" 2>/dev/null)
    if [[ $kind != files ]]; then
        compopt +o default 2>/dev/null
        [[ $partial == 1 ]] && compopt -o nospace 2>/dev/null
    elif ((${#COMPREPLY[@]})); then  # else readline completes files itself
        while IFS= read -r candidate; do
            COMPREPLY+=("$candidate")
            partial=0
        done < <(compgen -f -- "$raw")
        [[ $partial == 1 ]] && compopt -o nospace 2>/dev/null || compopt -o filenames 2>/dev/null
    fi
}
complete -o default -F _lockstep lockstep
"""

_ZSH = r"""
#compdef lockstep
# Completes lockstep in zsh.
_lockstep() {
    local kind line word
    local -a typed lines whole partial whole_shown partial_shown
    typed=("${(@Q)words[2,CURRENT]}")
    lines=("${(@f)$(PYTHON -P -m lockstep.cli.complete zsh "${typed[@]}" 2>/dev/null)}")
    kind=$lines[1]
    for line in "${(@)lines[2,-1]}"; do
        word=${line%%$'\t'*}
        if [[ $word == *[=.] ]]; then
            partial+=("$word") partial_shown+=("${line/$'\t'/  }")
        elif [[ -n $word ]]; then
            whole+=("$word") whole_shown+=("${line/$'\t'/  }")
        fi
    done
    local found=1
    (( $#whole )) && compadd -l -d whole_shown -a whole && found=0
    (( $#partial )) && compadd -l -S '' -d partial_shown -a partial && found=0
    if [[ $kind == files ]]; then
        [[ $words[CURRENT] == (-|)(-|)[A-Za-z_]*=* ]] && compset -P '*='
        _files && found=0
    fi
    return found
}
compdef _lockstep lockstep
"""

_FISH = r"""
# Completes lockstep in fish.
function __lockstep_complete
    set -l typed (commandline -opc)
    set -l current (commandline -ct)
    set -l lines (PYTHON -P -m lockstep.cli.complete fish $typed[2..-1] $current 2>/dev/null)
    test (count $lines) -gt 1; and printf '%s\n' $lines[2..-1]
    if test "$lines[1]" = files
        set -l prefix (string match -r '^-{0,2}[A-Za-z_][^=/]*=' -- $current)
        set -l start (string length -- "$prefix")
        for file in (__fish_complete_path (string sub -s (math $start + 1) -- "$current"))
            printf '%s%s\n' "$prefix" $file
        end
    end
end
complete -c lockstep -f -a '(__lockstep_complete)'
"""

_SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}
