#!/bin/sh
# Makes .venv with the locked dependencies; make calls it when .venv/.installed is missing or out of date.
#
#     [TORCH=BUILD] sh scripts/setup.sh [INTERPRETER]
#
# TORCH names another build of torch than PyPI's, such as cpu or cu126. It is remembered in .venv/.torch.
# Exit status: 0 when .venv is ready, 1 with a message that says what is missing and how to get it.
set -u
cd "$(dirname "$0")/.." || exit 1

say() { printf '%s\n' "$@" >&2; }
die() { say "$@"; exit 1; }

# Two lines: version, "fits" or "other", "complete" or "bare" (no ensurepip); then the interpreter behind
# all links and shims, so that .venv notices when a system upgrade removes exactly this one.
PROBE='
import os, sys
fits = (3, 11) <= sys.version_info[:2] < (3, 14)
try:
    import ensurepip, venv
    complete = True
except ImportError:
    complete = False
print("%d.%d.%d" % sys.version_info[:3], "fits" if fits else "other", "complete" if complete else "bare")
print(os.path.realpath(sys.executable))
'

# Sets $python to the first interpreter that fits, or stops. Each is called: a pyenv shim exists but may fail.
find_python() {
    [ $# -gt 0 ] || set -- python3 python3.12 python3.11 python3.13
    found='' bare=''
    for name in "$@"; do
        command -v "$name" >/dev/null 2>&1 || continue
        if ! answer=$("$name" -c "$PROBE" 2>/dev/null); then
            found="$found, $name (does not start)"
            continue
        fi
        path=$(printf '%s\n' "$answer" | sed -n 2p)
        version=$(printf '%s\n' "$answer" | sed -n '1s/ .*//p')
        case $answer in
            *" fits complete"*) python=$path; return ;;
            *" fits bare"*) bare=${bare:-"$version $path"} ;;
            *) found="$found, $name ($version)" ;;
        esac
    done
    if [ -n "$bare" ]; then
        minor=$(printf '%s\n' "$bare" | cut -d. -f1,2)
        # Debian's python3-venv serves the system's python3 alone; other versions have their own package.
        package=python$minor-venv
        [ "$(readlink -f /usr/bin/python3)" != "${bare#* }" ] || package=python3-venv
        die "Python ${bare%% *} (${bare#* }) cannot make virtual environments: ensurepip is missing." \
            "On Debian or Ubuntu: apt install $package"
    fi
    found=${found#, }
    die "Python 3.11, 3.12 or 3.13 is needed; found: ${found:-no program called $*}." \
        "On Debian or Ubuntu: apt install python3 python3-venv. Elsewhere: pipx install uv && uv python install 3.12." \
        "An interpreter in another place: make install PYTHON=/path/to/python3.12"
}

# Is .venv whole, with an interpreter that fits? It must also be a virtual environment and this very one: through a
# copied or linked bin/python without its pyvenv.cfg, pip would install into the system's interpreter.
CHECK='
import os, sys
import pip
real = os.path.realpath
here = sys.prefix != sys.base_prefix and real(sys.prefix) == real(".venv")
sys.exit(not (here and (3, 11) <= sys.version_info[:2] < (3, 14)))
'
works() { [ ! -e .venv/.installing ] && .venv/bin/python -c "$CHECK" >/dev/null 2>&1; }

mkdir -p .venv || exit 1
exec 9>.venv/.lock || exit 1
if command -v flock >/dev/null 2>&1 && ! flock -n 9; then
    say "another make is setting up .venv: waiting for it"
    flock 9
fi

remembered=$(cat .venv/.torch 2>/dev/null)
TORCH=${TORCH:-$remembered}
case $TORCH in
    [!cr]* | *[!a-z0-9.]*) die "TORCH=$TORCH: no such build of torch; allowed: cpu, or one for your GPU such as cu126" ;;
esac

# Content, not time: a git checkout that touches the lock without changing it installs nothing.
wanted=$(cksum <requirements.lock)$TORCH || exit 1
if [ "$(cat .venv/.installed 2>/dev/null)" = "$wanted" ] && works; then
    touch .venv/.installed
    exit 0
fi
rm -f .venv/.installed
trap 'say "" "The set-up was interrupted; the next make starts it again."; exit 130' INT TERM HUP

if ! works; then
    find_python "$@"
    find .venv -mindepth 1 -maxdepth 1 ! -name .lock -exec rm -rf {} + || exit 1
    output=$("$python" -m venv .venv 2>&1) ||
        die "$output" "$python could not make .venv."
    works || die "$python made a .venv that does not work; try another: make install PYTHON=/path/to/python3.12"
fi

command -v git >/dev/null 2>&1 ||
    say "note: git was not found; without it a run cannot record the code that made it (apt install git)"
# Measured: wheels, and what they unpack to.
download=540 disk=1760 cuda=''
if [ "$TORCH" != cpu ] && [ "$(uname)" = Linux ]; then
    download=3060 disk=5760 cuda=", at most: with CUDA, unless pip finds another build; without a GPU: make install TORCH=cpu"
fi
say "installing the locked dependencies into .venv, once: $download MB to download, $disk MB on disk$cuda"
megabytes() { du -sm "$1" 2>/dev/null | { read -r size rest; echo "${size:-0}"; }; }
# A line every ten seconds; on a terminal one that changes.
progress() {
    form='%s\n' pause=10 most=0
    [ ! -t 2 ] || form='\r%-60s' pause=2
    while sleep $pause 2>/dev/null && kill -0 $$ 2>/dev/null; do
        now=$(megabytes .venv/.tmp)
        [ "$now" -lt "$most" ] || most=$now # pip removes what it has installed
        # shellcheck disable=SC2059
        printf "$form" "    downloaded $most MB, installed $(megabytes .venv/lib) MB" >&2
    done
}
# Stays when pip was killed or ran out of space: then nothing in .venv can be trusted and it is made anew.
: >.venv/.installing || exit 1
printf '%s' "$TORCH" >.venv/.torch
lock=requirements.lock
if [ -n "$TORCH" ] && [ "$(uname)" = Linux ]; then # other systems have one build
    sed "s/^torch==.*/&+$TORCH/" requirements.lock >.venv/.lock.txt && lock=.venv/.lock.txt || exit 1
fi
mkdir -p .venv/.tmp || exit 1
progress >/dev/null 9>&- &
watch=$!
# A user's PIP_USER=1 would be an error in a virtual environment; outside of one, pip shall refuse. Modules are compiled
# when they are first imported: most of them never are, and compiling all takes two fifths of the time.
output=$(TMPDIR=$PWD/.venv/.tmp PIP_USER=0 PIP_REQUIRE_VIRTUALENV=1 .venv/bin/python -m pip install --quiet --no-compile \
    --disable-pip-version-check --no-input -r "$lock" 2>&1)
status=$?
{ kill -KILL $watch; wait $watch; } 2>/dev/null # TERM would be lost while the subshell still has the trap from above
[ ! -t 2 ] || say ""
rm -rf .venv/.tmp
if [ "$status" -ne 0 ]; then
    printf '%s' "$remembered" >.venv/.torch
    rm -f .venv/.installing # pip takes back what it has begun: an older .venv goes on working
    # The last error line, or the last line of a traceback.
    error=$(printf '%s\n' "$output" | grep -i 'error' | tail -n 1)
    error="    ${error:-$(printf '%s\n' "$output" | tail -n 1)}"
    set --
    [ -z "$TORCH" ] || set -- "PyPI has no torch for TORCH=$TORCH. The address of an index that has it is on pytorch.org, under Get Started:" \
        "    PIP_EXTRA_INDEX_URL=ADDRESS make install TORCH=$TORCH"
    die "The dependencies could not be installed. pip's last error:" "$error" "$@" \
        "The usual reasons are a full disk ($PWD/.venv needs $disk MB, and $download MB more for a moment)" \
        "and a network that is missing or has a proxy: pip config set global.proxy (or global.index-url) URL" \
        "To see all of it: .venv/bin/python -m pip install -r $lock"
fi
rm -f .venv/.installing
# The repository itself: a path file needs no build tools and shows every edit at once.
.venv/bin/python -c '
import os, pathlib, sysconfig
pathlib.Path(sysconfig.get_path("purelib"), "repository.pth").write_text(os.getcwd() + "\n")
' || exit 1
# Where Python may not write compiled modules (as in many images), each start would compile those of torch again.
[ -z "${PYTHONDONTWRITEBYTECODE-}" ] ||
    PYTHONDONTWRITEBYTECODE='' .venv/bin/python -c 'import gymnasium, hydra, torch._inductor.compile_fx' || exit 1
printf '%s\n' "$wanted" >.venv/.installed.new && mv .venv/.installed.new .venv/.installed
