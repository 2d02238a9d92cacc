#!/usr/bin/env bash
# A run on several nodes by c10d rendezvous: the same command on each of them, in any order.
#
#   NODES=4 HEAD=node1 c10d.sh CONFIG.yaml [key=value ...]
#
#   NODES    how many (1)
#   HEAD     one of them, by the name or address that the others reach it by
#   PORT     a free one there (29500)
#   RUN_ID   the same on all nodes, another for each run that uses HEAD and PORT (gspo)
#   ADDRESS  of this node, if its host name does not resolve to one that the others reach
#   WAIT     seconds that a node waits for the others (1800)
# and those of node.sh, which documents signals and exit codes.
set -euo pipefail

readonly HEAD="${HEAD:?HEAD is the name or address of the first node}" WAIT="${WAIT:-1800}"
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
settings="join_timeout=$WAIT,read_timeout=$WAIT"
address=()
if [[ -n ${ADDRESS:-} ]]; then
    address=(--local-addr "$ADDRESS")
    [[ $ADDRESS != "$HEAD" ]] || settings+=",is_host=true"
fi
exec "$here/node.sh" --nnodes "${NODES:-1}" --rdzv-backend c10d --rdzv-endpoint "$HEAD:${PORT:-29500}" \
    --rdzv-id "${RUN_ID:-gspo}" --rdzv-conf "$settings" "${address[@]}" -- "$@"
