#!/usr/bin/env bash
# A run as a Slurm job: training on the first nodes, SGLang servers on the last SERVER_NODES.
#
#   sbatch --nodes 4 examples/launch/slurm.sh CONFIG.yaml [key=value ...]
#
#   SERVER_NODES      nodes of the job that only serve (0: the config has the servers)
#   MODEL             Hugging Face directory, for training and servers (with SERVER_NODES)
#   SGLANG_PYTHON     interpreter of SGLang's environment (with SERVER_NODES)
#   SERVERS_PER_NODE  how many (4), of SERVER_GPUS GPUs each (2)
#   SERVER_PORT       of the first server of a node (31000)
#   SERVER_ARGS       more for megatron-gspo serve, e.g. "--sglang.mem-fraction-static 0.9"; "--routed-experts" where routes of
#                     the servers are replayed (routing.replay: r3)
# and PORT and WAIT of static.sh, and those of node.sh; edit or override the lines below for your cluster.
#
# Before the time limit, and at a pre-emption with notice, the run saves and stops, and the job is requeued. It
# then resumes from its checkpoint, as after a node failure. A failed or cancelled run is not requeued.
#SBATCH --job-name=gspo
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@1200
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
# USR1 comes 20 minutes before the limit: more than the longest step and a save take. B: to this script alone. mem=0:
# all of a node's memory; exclusive means its processors and GPUs.
set -euo pipefail

readonly STOPPED=75
readonly servers="${SERVER_NODES:-0}" per_node="${SERVERS_PER_NODE:-4}" gpus="${SERVER_GPUS:-2}"
readonly port="${SERVER_PORT:-31000}"
: "${SLURM_JOB_ID:?start this script with sbatch}"
# Slurm runs a copy of this script from its spool directory: the others are found from where sbatch was called.
readonly scripts="${SCRIPTS:-$SLURM_SUBMIT_DIR/examples/launch}"
export LOG_DIR="${LOG_DIR:-logs/$SLURM_JOB_ID}" PYTHON="${PYTHON:-python}"

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
training=$(( ${#nodes[@]} - servers ))
if (( $# == 0 || training < 1 )); then
    echo "usage: sbatch --nodes N slurm.sh CONFIG.yaml [key=value ...], with SERVER_NODES < N" >&2
    exit 2
fi
mkdir -p "$LOG_DIR"

join() {
    local IFS=,
    echo "$*"
}

# cpu-bind: the ranks of a node are one task to Slurm, which could bind all of them to one core. kill-on-bad-exit: the
# node that has stopped first takes no other with it.
step=(--cpu-bind=none --kill-on-bad-exit=0)
overrides=()
if (( servers > 0 )); then
    : "${MODEL:?MODEL is the model directory}" "${SGLANG_PYTHON:?SGLANG_PYTHON is the interpreter that has sglang}"
    key="$LOG_DIR/server_key"
    [[ -s $key ]] || (umask 077 && od -An -N 24 -t x1 /dev/urandom | tr -d ' \n' > "$key")
    urls=()
    for node in "${nodes[@]:training}"; do
        for (( i = 0; i < per_node; i++ )); do
            urls+=("http://$node:$(( port + i ))")
        done
    done
    # the trainer would look for the servers behind the proxy of the environment
    no_proxy="${no_proxy:-${NO_PROXY:-}}"
    no_proxy="${no_proxy:+$no_proxy,}$(join "${nodes[@]:training}")"
    export no_proxy
    overrides=(
        "model.path=$MODEL" "rollout.engine=sglang" "sglang.urls=[$(join "${urls[@]}")]"
        "sglang.api_key_file=$key" "sglang.master_address=${nodes[0]}"
    )
    read -ra more <<< "${SERVER_ARGS:-}"
    # Slurm sends SIGTERM to the tasks of all steps when it takes a job's nodes: the servers ignore it until
    # the current step is done.
    # shellcheck disable=SC2016  # expanded on the node
    keep='trap : TERM USR1; "$@" --log-dir "$LOG_DIR/servers/$(uname -n)" & while wait $!; (( $? > 128 )); do :; done'
    srun "${step[@]}" --nodes "$servers" --ntasks "$servers" --nodelist "$(join "${nodes[@]:training}")" \
        --output "$LOG_DIR/servers-%N.log" \
        bash -c "$keep" servers "$PYTHON" -m megatron_gspo serve --model "$MODEL" \
        --python "$SGLANG_PYTHON" --servers "$per_node" --port "$port" --api-key-file "$key" --start-timeout 1800 \
        --sglang.host 0.0.0.0 --sglang.tp-size "$gpus" "${more[@]}" &
fi

# Static rendezvous: rank 0, from which servers get their weights, must be on the node whose address they get.
# c10d would number the nodes by the order of their names, node10 before node9.
export NODES=$training HEAD="${nodes[0]}" RUN_ID="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"
# shellcheck disable=SC2016  # expanded on the node
srun "${step[@]}" --nodes "$training" --ntasks "$training" --nodelist "$(join "${nodes[@]:0:training}")" \
    bash -c 'NODE_RANK=$SLURM_NODEID exec "$@"' run "$scripts/static.sh" "$1" "${overrides[@]}" "${@:2}" &
run=$!

# srun hands SIGUSR1 to its tasks, and under proctrack/cgroup to no process of theirs. SIGTERM they get from Slurm: at a
# pre-emption's notice they alone, and this script too when the job is taken away, as by scancel.
code=0 ended=
trap 'kill -USR1 "$run" 2>/dev/null || true' USR1
trap 'ended=yes; kill -USR1 "$run" 2>/dev/null || true' TERM
while kill -0 "$run" 2>/dev/null; do
    sleep 1 &
    wait $! || true  # wait, unlike sleep, ends at a signal
done
wait "$run" || code=$?

if (( code == STOPPED )) && [[ -n $ended ]]; then
    echo "slurm.sh: the job was ended and the run has a checkpoint; it resumes when submitted again" >&2
elif (( code == STOPPED )); then
    echo "slurm.sh: the run has stopped with a checkpoint; the job is queued again" >&2
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
