# Completes words of make and of the package's program in bash and zsh. `make completion` installs it.
# shellcheck shell=bash

# `sh completion.sh install`: one line in the start-up file of the user's shell.
if [ "${1-}" = install ]; then
    case ${SHELL-} in
        */zsh) file=${ZDOTDIR:-$HOME}/.zshrc ;;
        *) file=$HOME/.bashrc ;;
    esac
    script="'$(cd "$(dirname "$0")" && pwd)/completion.sh'"
    line="[ ! -f $script ] || source $script"
    grep -qsxF "$line" "$file" || printf '%s\n' "$line" >>"$file" || exit 1
    echo "$file has the line: $line"
    exit 0
fi

# Prints a candidate per line for the words before the cursor; fails outside of a checkout.
_rltemplate_candidates() {
    [ -x .venv/bin/python ] && [ -d rltemplate ] || return 1
    .venv/bin/python -m rltemplate complete "$@" 2>/dev/null
}

if [ -n "${ZSH_VERSION-}" ]; then
    _rltemplate_zsh() {
        local -a found
        if found=(${(f)"$(_rltemplate_candidates "${(@)words[2,CURRENT]}")"}); then
            compadd -S '' -- $found
        elif [[ ${words[1]} = make ]]; then
            _make "$@"
        fi
    }
    autoload -Uz compinit && compinit -u
    compdef _rltemplate_zsh make rltemplate
else
    _rltemplate_bash() {
        local line=${COMP_LINE:0:COMP_POINT} words last cut
        read -ra words <<<"$line"
        [[ $line == *' ' ]] && words+=('')
        mapfile -t COMPREPLY < <(_rltemplate_candidates "${words[@]:1}")
        # Bash splits words at = and : and replaces only what comes after the last of them.
        last=${words[-1]}
        cut=${last%"${last##*[=:]}"}
        COMPREPLY=("${COMPREPLY[@]#"$cut"}")
        [[ ${COMPREPLY[0]-} == *= ]] && compopt -o nospace
    }
    complete -o bashdefault -o default -F _rltemplate_bash make rltemplate
fi
