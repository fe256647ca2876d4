#!/bin/sh
# Serve a policy and train it by distillation with hindsight hints: a judge that has seen the next message writes what
# the policy should have been told (3 votes at temperature 0.6, the longest hint counts), and the model before training,
# told so, is the teacher; clipped surrogate 0.2 / 0.28, KL 0.02.
#
#   STUDENT=models/student JUDGE=http://127.0.0.1:9000/v1 scripts/launch/proxy_opd_hints.sh [further options]
#
# Everything it writes is under RESULTS (default results/proxy-opd-hints); started again it goes on from there.
set -eu
: "${STUDENT:?name the folder of the model in STUDENT}"
RESULTS=${RESULTS:-results/proxy-opd-hints}
mkdir -p "$RESULTS"
exec turngym serve proxy --algorithm opd-hints --student "$STUDENT" --out "$RESULTS" \
    ${JUDGE:+--judge "$JUDGE" --judge-votes 3 --judge-temperature 0.6} \
    --opd-hints.clip 0.2 0.28 --opd-hints.kl-coef 0.02 --opd-hints.entropy-coef 0 \
    --batch-turns 16 --run.temperature 1.0 --optimizer.lr "${LR:-1e-6}" "$@"
