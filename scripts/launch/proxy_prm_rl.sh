#!/bin/sh
# Serve a policy and train it by binary PRM-RL on what its clients do: a judge that has seen the next message scores
# every turn by 3 votes at temperature 0.6; clipped surrogate 0.2 / 0.28, KL 0.02 to the model before training.
#
#   STUDENT=models/student JUDGE=http://127.0.0.1:9000/v1 scripts/launch/proxy_prm_rl.sh [further options]
#
# Everything it writes is under RESULTS (default results/proxy-prm-rl); started again it goes on from there.
set -eu
: "${STUDENT:?name the folder of the model in STUDENT}"
RESULTS=${RESULTS:-results/proxy-prm-rl}
mkdir -p "$RESULTS"
exec turngym serve proxy --algorithm prm-rl --student "$STUDENT" --out "$RESULTS" \
    ${JUDGE:+--judge "$JUDGE" --judge-votes 3 --judge-temperature 0.6} \
    --prm-rl.clip 0.2 0.28 --prm-rl.kl-coef 0.02 --prm-rl.entropy-coef 0 \
    --batch-turns 16 --run.temperature 1.0 --optimizer.lr "${LR:-1e-6}" "$@"
