# Read by each bash of the script before anything else. Keeps file:line of each command: for the programs, and in a
# file (written over what was there, as the script may be ended at any time).
if [[ $0 != "$RONDO_ROOT"/.bin/* && $0 != "$RONDO_ROOT"/.program.sh ]]; then
    command_not_found_handle() { "$RONDO_ROOT/.program.sh" "$@"; }
    # Programs that it names by their whole paths. A function may be called like that.
    for RONDO_PLACE in $RONDO_PLACES; do eval "$RONDO_PLACE() { ${RONDO_PLACE##*/} \"\$@\"; }"; done
    exec {BASH_XTRACEFD}>/dev/null
    set -T
    trap '[[ -z ${BASH_SOURCE-} || $BASH_SOURCE == */.before.sh ]] || {
        export RONDO_AT=$BASH_SOURCE:$((LINENO - 1)); echo "$RONDO_AT" 1<>"$RONDO_ROOT/.at"; }' DEBUG
fi
