#!/usr/bin/env bash
# Trains variants of a recipe for a few steps each, several at a time, and compares them.
#
#   bash scripts/ablate.sh DATA OUT [STEPS] [JOBS] [extra flags for train_drafter.py]
#
# One override of configs/train/smollm2.py a variant; ONLY="base layers1" picks some of them.
# CONFIG names another recipe, PYTHON another interpreter. With several GPUs the jobs alternate.
set -u
data=$1 out=$2 steps=${3:-1000} jobs=${4:-2}
shift $(($# < 4 ? $# : 4))
config=${CONFIG:-configs/train/smollm2.py}
python=${PYTHON:-python3}
gpus=$(nvidia-smi -L 2>/dev/null | wc -l)
mkdir -p "$out"

variants() {
  cat <<'LIST'
base
layers1 --config.drafter.num_layers=1
layers2 --config.drafter.num_layers=2
layers4 --config.drafter.num_layers=4
layers5 --config.drafter.num_layers=5
block16 --config.drafter.block_size=16
vocab0 --config.drafter.draft_vocab_size=0
vocab8k --config.drafter.draft_vocab_size=8192
taps3 --config.drafter.target_layer_ids=(8,17,27)
inter768 --config.drafter.intermediate_size=768
rank0 --config.drafter.selector_rank=0
rank64 --config.drafter.selector_rank=64
conv0 --config.drafter.conv_kernel_size=0
label50 --config.train.label_weight=0.5
replace --config.train.selector_replaces=True
selector50 --config.train.selector_weight=0.5
rate1e-3 --config.train.learning_rate=0.001
rate4e-3 --config.train.learning_rate=0.004
adamw --config.train.optimizer=adamw
LIST
}

train() { # NUMBER NAME FLAGS...
  local number=$1 name=$2
  shift 2
  [ "$gpus" -gt 1 ] && export CUDA_VISIBLE_DEVICES=$((number % gpus))
  "$python" scripts/train_drafter.py --config="$config" --data="$data" --out="$out/$name" \
    --config.train.steps="$steps" "$@" >"$out/$name.log" 2>&1
  echo "$name $(grep 'HELD OUT' "$out/$name.log" | tail -1)"
}

number=0
while read -r name flags; do
  [[ -n ${ONLY:-} && " $ONLY " != *" $name "* ]] && continue
  while [ "$(jobs -rp | wc -l)" -ge "$jobs" ]; do wait -n; done
  # shellcheck disable=SC2086  # flags are words
  train "$number" "$name" $flags "$@" &
  number=$((number + 1))
done < <(variants)
wait
