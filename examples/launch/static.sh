#!/usr/bin/env bash
# A run on several nodes by static rendezvous: each node gets its number.
#
#   NODES=4 NODE_RANK=0 HEAD=node1 static.sh CONFIG.yaml [key=value ...]
#
#   NODES      how many (1)
#   NODE_RANK  this node's number, 0 to NODES - 1; 0 is HEAD
#   HEAD       name or address of node 0
#   PORT       a free one there (29500)
#   RUN_ID     names the folder of the logs (gspo)
#   WAIT       seconds that a node waits for the others (1800)
# and those of node.sh, which documents signals and exit codes. Their defaults are Kubeflow's PyTorchJob variables: RANK (of
# a pod), MASTER_ADDR and MASTER_PORT.
set -euo pipefail

readonly NODES="${NODES:-1}" WAIT="${WAIT:-1800}"
rank="${NODE_RANK:-${PET_NODE_RANK:-${RANK:-}}}"
head="${HEAD:-${MASTER_ADDR:-}}"
if (( NODES == 1 )); then
    rank=0 head=127.0.0.1
fi
: "${rank:?NODE_RANK is the number of this node, from 0}" "${head:?HEAD is the name or address of node 0}"
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
exec "$here/node.sh" --nnodes "$NODES" --node-rank "$rank" --rdzv-id "${RUN_ID:-gspo}" --master-addr "$head" \
    --master-port "${PORT:-${MASTER_PORT:-29500}}" --rdzv-conf "timeout=$WAIT" -- "$@"
