# Completion of make's targets and words with the Tab key, for bash. Once per shell, or in ~/.bashrc:
#
#     source scripts/completion.bash
#
# It acts in this project's folder and asks scripts/train.py for keys and values. In any other folder the completion
# that make had before goes on working. For python scripts/train.py: eval "$(python scripts/train.py -sc install=bash)"

_rltemplate_make() {
    local line=${COMP_LINE:0:COMP_POINT} word target choices= choice kept=
    word=${line##* }
    if [ ! -f scripts/train.py ] || [ ! -x .venv/bin/python ]; then
        [ -z "$_rltemplate_before" ] || "$_rltemplate_before" "$@"
        return
    fi
    read -r _ target _ <<<"${line% *} "
    case $word in
        run=* | a=* | b=*) choices=$(ls -d -- runs/*/*/ 2>/dev/null | sed "s|^runs/[^/]*/\(.*\)/\$|${word%%=*}=\1|") ;;
        *) case $target in
            '') choices=$(sed -n 's/^\([a-z-]*\):.*## .*/\1/p' Makefile) ;;
            # Names that begin with _ are those of types, which nobody chooses.
            train | prove) choices=$(COMP_LINE="python scripts/train.py ${line#*"$target"}" \
                .venv/bin/python scripts/train.py -sc query=bash 2>/dev/null | tr ' ' '\n' | grep -v '=_') ;;
        esac ;;
    esac
    # bash replaces only what follows the last = as long as this is one of its word breaks.
    [[ $COMP_WORDBREAKS != *=* || $word != *=* ]] || kept=${word%=*}=
    COMPREPLY=()
    while read -r choice; do # compgen -W would expand a $ in a choice
        [[ -z $choice || $choice != "$word"* ]] || COMPREPLY+=("${choice#"$kept"}")
    done <<<"$choices"
    case ${COMPREPLY[0]-} in *[=.]) compopt -o nospace 2>/dev/null ;; esac
}

if declare -F _completion_loader >/dev/null; then _completion_loader make; fi
case $(complete -p make 2>/dev/null) in
    *_rltemplate_make*) ;;
    *) _rltemplate_before=$(complete -p make 2>/dev/null | sed -n 's/.* -F \([^ ]*\) .*/\1/p') ;;
esac
complete -o default -F _rltemplate_make make
