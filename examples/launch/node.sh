#!/usr/bin/env bash
# One node's part of a run: torchrun with the environment, logs, signals and restarts of a cluster.
#
#   node.sh [option of torchrun ...] -- CONFIG.yaml [key=value ...]
#
# static.sh and c10d.sh call it with their rendezvous; alone it needs --standalone: one node.
#
#   PROCESSES  per node, one for each GPU (8)
#   PYTHON     interpreter of the trainer (python)
#   LOG_DIR    gets <node>/<run>/attempt_0/<local rank>/{stdout,stderr}.log; this script's output has the same (logs)
#   IFNAME     network interface of gloo's and NCCL's sockets, if a node has several (default: their choice)
#   RESTARTS   restarts of a failed run, from its last checkpoint (0)
#   PAUSE      seconds before that (10)
#
# SIGUSR1 or SIGTERM: the run saves after the current step and stops. SIGINT, or a second SIGTERM: it ends now.
# Exit code: 0: finished; 75: stopped, start again to continue; otherwise it failed.
set -euo pipefail

readonly PROCESSES="${PROCESSES:-8}" PYTHON="${PYTHON:-python}" LOG_DIR="${LOG_DIR:-logs}"
readonly RESTARTS="${RESTARTS:-0}" PAUSE="${PAUSE:-10}" STOPPED=75

rendezvous=()
while (( $# )) && [[ $1 != -- ]]; do
    rendezvous+=("$1")
    shift
done
if (( $# < 2 )); then
    echo "usage: ${0##*/} [option of torchrun ...] -- CONFIG.yaml [key=value ...]" >&2
    exit 2
fi
shift

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"  # many processes with many threads slow each other down
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"  # Megatron: kernels start in the order of calls
export NCCL_DEBUG="${NCCL_DEBUG:-WARN}"
export HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}"  # everything is on disk
export TOKENIZERS_PARALLELISM="${TOKENIZERS_PARALLELISM:-false}"  # it warns in each forked process otherwise
export PYTHONUNBUFFERED=1
trap '' HUP  # a terminal that hangs up ends no run; torchrun would end it
export PET_SIGNALS_TO_HANDLE="${PET_SIGNALS_TO_HANDLE:-SIGTERM,SIGINT,SIGQUIT}"
if [[ -n ${IFNAME:-} ]]; then
    export GLOO_SOCKET_IFNAME="$IFNAME" NCCL_SOCKET_IFNAME="$IFNAME"
fi

# Also the first check of the config: a misspelt key ends here, on every node.
run_dir=$("$PYTHON" - "$@" <<'PROGRAM'
import sys
from megatron_gspo.config import ConfigError, load_config
from megatron_gspo.config.load import split_server_arguments

try:
    print(load_config(sys.argv[1], split_server_arguments(sys.argv[2:])[0]).run_dir)
except ConfigError as error:
    sys.exit(f"config error: {error}")
PROGRAM
) || exit 2

agent=  # process id of torchrun
asked=  # "save" or "now": how the run is to stop

workers() {
    cat /proc/"$agent"/task/*/children 2>/dev/null || true
}

end_now() {
    asked=now
    [[ -z $agent ]] || kill -TERM "$agent" 2>/dev/null || true
}

ask() {
    asked=save
    echo "${0##*/}: stop requested: the run saves after this step" >&2
    trap end_now TERM
}

trap ask USR1 TERM
trap end_now INT

# Wait for torchrun and repeat the stop signal: a rank that is still loading does not handle it yet.
follow() {
    local code=0 pids
    while kill -0 "$agent" 2>/dev/null; do
        if [[ $asked == save ]]; then
            read -ra pids < <(workers) || true
            (( ${#pids[@]} == 0 )) || kill -USR1 "${pids[@]}" 2>/dev/null || true
        fi
        sleep 1 &
        wait $! || true  # wait, unlike sleep, ends at a signal
    done
    wait "$agent" || code=$?
    return "$code"
}

# summary.json is the last file of a finished run. A network file system may show it late.
is_finished() {
    local try
    for try in 1 2 3 4 5; do
        [[ ! -f $run_dir/summary.json ]] || return 0
        (( try == 5 )) || sleep 1
    done
    return 1
}

set -m  # torchrun in a process group of its own: Ctrl-C reaches it through end_now, once
for (( attempt = 0; ; attempt++ )); do
    (
        trap '' USR1  # inherited: it ends no process before the trainer handles it
        trap - INT TERM
        exec "$PYTHON" -m torch.distributed.run "${rendezvous[@]}" --nproc-per-node "$PROCESSES" \
            --log-dir "$LOG_DIR/$(uname -n)" --tee 3 -m megatron_gspo.train "$@"
    ) &
    agent=$!
    code=0
    follow || code=$?
    if (( code == 0 )); then
        is_finished || exit "$STOPPED"
        exit 0
    fi
    if [[ -n $asked ]] || (( attempt >= RESTARTS )); then
        exit "$code"
    fi
    echo "${0##*/}: torchrun ended with $code; start $(( attempt + 1 )) of $RESTARTS again in $PAUSE s" >&2
    sleep "$PAUSE"
done
