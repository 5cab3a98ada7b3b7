# Runs a launch script in the sandbox, and writes what came of it to standard output, with a NUL behind each field:
# the folder that stands for /, the exit code, file:line of the last command, the end of standard error; then of each
# program that would have run: file:line, how many words, the words.
# Usage: boot.sh TOKEN CWD HOME SCRIPT SECONDS MARKER PLACES [NAME=VALUE …] -- [ARGUMENT …]
root=$PWD/$1 cwd=$2 home=$3 script=$4 seconds=$5 marker=$6 places=$7
shift 7
environment=()
while [ "$1" != -- ]; do environment+=("$1"); shift; done
shift

# What the script may really run.
tools="basename cat cut date dirname echo env expr false find grep egrep head join ls mktemp nl nohup nproc paste
    printf pwd readlink realpath rev sed seq sh bash sort split stat tac tail tee test timeout tr true uname uniq wc
    xargs awk mawk gawk sha256sum md5sum base64 id tty yes"
# These, too, but they do not fail: what they would change may not be here.
changing="mkdir rm cp mv touch ln chmod rmdir truncate"
# Programs that the script finds, and that do nothing. One that it names and does not find does nothing either.
programs="python python3 torchrun ray accelerate deepspeed pip pip3 uv conda wget curl huggingface-cli hf git srun
    sbatch nvidia-smi npu-smi rocm-smi sleep ps pkill killall hostname sudo apt apt-get docker ssh scp rsync jq module"

bin=$root/.bin
mkdir -p "$bin" "$root/.ran" "$root$cwd" "$root$home"
chmod +x "$root/.program.sh" "$root/.changing.sh"
for name in $tools; do [ -x /usr/bin/$name ] && ln -s /usr/bin/$name "$bin/$name"; done
for name in $programs; do ln -s ../.program.sh "$bin/$name"; done
for name in $changing; do ln -s ../.changing.sh "$bin/$name"; done

cd "$root$cwd"
env -i PATH="$bin" HOME="$root$home" USER=user LANG=C.UTF-8 BASH_ENV="$root/.before.sh" \
    RONDO_ROOT="$root" RONDO_MARKER="$marker" RONDO_PLACES="$places" "${environment[@]}" \
    timeout -k 1 "$seconds" bash "$root$script" "$@" </dev/null >/dev/null 2>"$root/.said"
code=$?
printf '%s\0' "$root" "$code" "$(head -n 1 "$root/.at" 2>/dev/null)" "$(tail -c 20000 "$root/.said")"
for ((n = 1; ; n++)); do [ -e "$root/.ran/$n" ] && cat "$root/.ran/$n" || break; done
